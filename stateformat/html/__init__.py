"""Documents as HTML and inline SVG: pages that need no network and no script, and notebook output.

Drawing only: nothing here reads a store. Read ``elements`` first: whatever comes from a checkpoint
is text there, and cannot become markup. ``style`` is the only style sheet, ``pieces`` has tables
and badges, ``charts`` bars and lines, ``layering`` and ``graph`` draw the job graph. ``report``
(with ``report_states``) is the page of ``ckpt report``; ``notebook`` has what Jupyter shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .elements import (
        GENERATOR as GENERATOR,
        Element as Element,
        document as document,
        element as element,
        fragment as fragment,
    )
    from .graph import draw_graph as draw_graph
    from .notebook import (
        checkpoint_html as checkpoint_html,
        dataflow_html as dataflow_html,
        diff_html as diff_html,
        plan_html as plan_html,
        store_html as store_html,
    )
    from .report import report_page as report_page
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".elements": "GENERATOR Element document element fragment",
            ".graph": "draw_graph",
            ".notebook": "checkpoint_html dataflow_html diff_html plan_html store_html",
            ".report": "report_page",
        },
    )
