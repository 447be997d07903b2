"""What is shown, and how: a document becomes blocks, and blocks become text or HTML.

``checkpoint``, ``restore``, ``difference`` and ``report`` decide what a page shows; ``html`` (with
``elements``, ``drawings`` and ``style``) and ``stateformat.tools.ckpt.text`` draw it. Nothing here
reads a store.
"""
