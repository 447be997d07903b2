"""The only style sheet: light and dark, wide and narrow, screen and paper.

Everything is within ``.sf``, because a notebook has a style of its own. Colors are variables; text
has a contrast of at least 4.5 with its background. It loads nothing.
"""

from __future__ import annotations

from typing import Final

_LIGHT: Final = """
--ground:#f6f7f9;--card:#ffffff;--text:#1b2430;--quiet:#55606e;--line:#dfe3e8;--soft:#eef1f5;
--accent:#2a5bc0;--bar:#5b86d6;--hot:#b9740f;--good:#14693c;--good-soft:#e4f3ea;--some:#7d4e00;--some-soft:#fbf0d9;
--bad:#a8201a;--bad-soft:#fbe9e7;--loop:#7a3fa8;
"""
_DARK: Final = """
--ground:#11151a;--card:#1a2027;--text:#e5e9ef;--quiet:#a3aebb;--line:#303842;--soft:#242b34;
--accent:#8ab0ff;--bar:#5f88d6;--hot:#eab866;--good:#66cf9a;--good-soft:#173326;--some:#eab866;--some-soft:#3a2d12;
--bad:#ff958c;--bad-soft:#43201d;--loop:#c9a0ee;
"""
_RULES: Final = """
.sf{LIGHTbackground:var(--ground);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"Noto Sans","DejaVu Sans",sans-serif;color-scheme:light;-webkit-text-size-adjust:100%}
@media (prefers-color-scheme:dark){.sf{DARKcolor-scheme:dark}}
[data-jp-theme-light=false] .sf,.vscode-dark .sf{DARKcolor-scheme:dark}
[data-jp-theme-light=true] .sf,.vscode-light .sf{LIGHTcolor-scheme:light}
.sf *{box-sizing:border-box}
body.sf{margin:0;padding:24px 16px 48px}
div.sf{background:var(--card);padding:10px 12px;border:1px solid var(--line);border-radius:8px;max-width:1080px;
font-size:13px}
.sf main,.sf header,.sf footer{max-width:1080px;margin:0 auto}
.sf h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
.sf h2{font-size:17px;margin:0 0 10px;overflow-wrap:anywhere}
.sf h3{font-size:14px;margin:16px 0 6px;overflow-wrap:anywhere}
.sf p{margin:4px 0;overflow-wrap:anywhere}
.sf ul{margin:4px 0;padding-left:20px}
.sf li{overflow-wrap:anywhere}
.sf code{font:.92em/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere;unicode-bidi:isolate}
.sf .quiet{color:var(--quiet)}
.sf section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:14px 0}
.sf .row{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:baseline}
.sf .spread{justify-content:space-between}
.sf .badge{display:inline-block;border-radius:99px;padding:1px 10px;font-size:13px;font-weight:600;
background:var(--soft);color:var(--quiet);white-space:nowrap}
.sf .good{background:var(--good-soft);color:var(--good)}
.sf .some{background:var(--some-soft);color:var(--some)}
.sf .bad{background:var(--bad-soft);color:var(--bad)}
.sf .alarm{border-left:4px solid var(--bad)}
.sf .notice{border-left:4px solid var(--some)}
.sf .cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0 0}
.sf .card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px;min-width:0}
.sf .card strong{display:block;font-size:21px;line-height:1.3;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}
.sf .card span,.sf .card small{display:block;color:var(--quiet);font-size:13px;overflow-wrap:anywhere}
.sf .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,260px),1fr));gap:18px 28px}
.sf figure{margin:0;min-width:0}
.sf figcaption{font-size:13px;color:var(--quiet);display:flex;justify-content:space-between;gap:8px}
.sf figcaption strong{color:var(--text);font-variant-numeric:tabular-nums}
.sf .axis{display:flex;justify-content:space-between;gap:8px;font-size:12px;color:var(--quiet);
font-variant-numeric:tabular-nums}
.sf svg{display:block}
.sf svg.plot{width:100%;height:72px;border-bottom:1px solid var(--line);overflow:visible}
.sf svg.spark{width:96px;height:22px;display:inline-block;vertical-align:middle}
.sf svg.share{width:100%;min-width:64px;height:8px;border-radius:4px;background:var(--soft)}
.sf .b{fill:var(--bar)}.sf .n{fill:var(--accent)}.sf .e{fill:var(--hot)}.sf .z{fill:var(--line)}
.sf .hit{fill:transparent}.sf .area{fill:var(--bar);opacity:.18}
.sf .trace{fill:none;stroke:var(--accent);stroke-width:1.8;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.sf .at{fill:none;stroke:var(--accent);stroke-width:8;stroke-linecap:round;vector-effect:non-scaling-stroke}
.sf .legend{display:flex;gap:6px;align-items:center;font-size:12px;color:var(--quiet)}
.sf table{border-collapse:collapse;width:100%;font-size:14px}
div.sf table{font-size:13px}
.sf caption{text-align:left;color:var(--quiet);font-size:13px;padding:2px 0}
.sf th,.sf td{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);
background:none;color:inherit;overflow-wrap:anywhere}
.sf th{font-weight:600;color:var(--quiet);font-size:13px;white-space:nowrap}
.sf .r{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;overflow-wrap:normal}
.sf .k{white-space:nowrap;overflow-wrap:normal}
.sf td:last-child,.sf th:last-child{padding-right:0}
.sf dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:3px 18px;margin:0;font-size:14px}
.sf dt{color:var(--quiet)}
.sf dd{margin:0;overflow-wrap:anywhere}
.sf details{margin:10px 0 0}
.sf details details{margin:8px 0 0 4px}
.sf summary{cursor:pointer;color:var(--accent);font-size:14px;overflow-wrap:anywhere}
.sf summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:4px}
.sf .inside{padding:8px 0 2px}
.sf .line{display:grid;grid-template-columns:minmax(0,1fr) 104px 84px 84px 110px 100px 62px;gap:0 14px;
align-items:center;font-size:14px;color:var(--text);flex:1;min-width:0}
.sf .few{grid-template-columns:minmax(0,1fr) 104px 84px 84px 190px}
.sf .six{grid-template-columns:minmax(0,1fr) 160px 84px 84px 120px 62px}.sf .six>:nth-child(6){text-align:right}
.sf .group{font-weight:600;margin-top:8px}
div.sf>.spread:not(:first-of-type),.sf dl+table,.sf dl+.states,.sf table+div{margin-top:12px}
.sf .titles{color:var(--quiet);font-size:13px;font-weight:600;padding:0 0 4px 20px;border-bottom:1px solid var(--line)}
.sf .line>:nth-child(3),.sf .line>:nth-child(4),.sf .line>:nth-child(7){text-align:right;
font-variant-numeric:tabular-nums}
.sf .line>span{min-width:0;overflow-wrap:anywhere}
.sf .states>details{margin:0;border-bottom:1px solid var(--line)}
.sf .states>details>summary{display:flex;align-items:center;padding:6px 0;list-style:none}
.sf .states>details>summary::-webkit-details-marker{display:none}
.sf .states>details>summary::before{content:"";flex:none;width:0;height:0;margin:0 10px 0 4px;
border:5px solid transparent;border-left-color:var(--accent);border-right-width:0}
.sf .states>details[open]>summary::before{transform:rotate(90deg)}
.sf .states>details>.inside{padding:6px 0 16px 20px}
.sf .states dl{margin-top:12px}
.sf .graph{overflow-x:auto}
.sf .graph svg{max-width:100%;height:auto;margin:0 auto}
.sf .graph.wide svg{max-width:none}
.sf .narrow{display:none}
.sf .graph rect.op{fill:var(--card);stroke:var(--quiet);stroke-width:1.2}
.sf .graph rect.finished{fill:var(--good-soft);stroke:var(--good)}
.sf .graph rect.partly{fill:var(--some-soft);stroke:var(--some);stroke-dasharray:6 3}
.sf .graph text{fill:var(--text);font-size:12.5px}
.sf .graph text.q{fill:var(--quiet);font-size:11px}
.sf .graph text.e{fill:var(--quiet);font-size:11px;stroke:var(--card);stroke-width:4px;paint-order:stroke}
.sf .graph .edge,.sf .key .edge{fill:none;stroke:var(--quiet);stroke-width:1.4}
.sf .graph .tip{fill:var(--quiet)}
.sf .edge.hash{stroke-width:2.4}.sf .edge.broadcast{stroke-dasharray:1.5 4;stroke-width:2.4;stroke-linecap:round}
.sf .edge.rebalance{stroke-dasharray:7 4}.sf .edge.rescale{stroke-dasharray:9 3 2 3}
.sf .graph .edge.feedback,.sf .key .edge.feedback{stroke:var(--loop);stroke-dasharray:4 3}
.sf .graph .tip.feedback{fill:var(--loop)}
.sf .mark{fill:none;stroke:var(--quiet);stroke-width:1.6}
.sf .mark.finished{fill:var(--good);stroke:var(--good)}
.sf .mark.partly{stroke:var(--some)}.sf .half{fill:var(--some)}
.sf .key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:12.5px;color:var(--quiet);margin-top:10px}
.sf .key span{display:inline-flex;align-items:center;gap:6px}
.sf footer{font-size:13px;color:var(--quiet);padding:8px 2px}
@media (max-width:700px){
body.sf{padding:14px 10px 32px}
.sf section{padding:13px 13px}
.sf h1{font-size:21px}
.sf .cards{grid-template-columns:repeat(2,minmax(0,1fr))}
.sf .narrow{display:block}.sf .wide{display:none}
.sf dl{grid-template-columns:minmax(0,1fr);gap:0}.sf dd{margin-bottom:6px}
.sf .card:last-child:nth-child(odd){grid-column:span 2}
.sf .titles{display:none}
.sf .line{grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:1px 14px}
.sf .line>.name{grid-column:span 2}
.sf .line>span:not(.name){text-align:left!important;font-size:13px}
.sf .line>span:not(.name):not(.share)::before{content:attr(data-label) " ";color:var(--quiet)}
.sf .line>.share{align-self:center}
.sf .states>details>summary{align-items:flex-start}
.sf .states>details>summary::before{margin-top:6px}
.sf .states .charts figure+figure{display:none}
.sf table.stack,.sf .stack tbody,.sf .stack tr,.sf .stack td{display:block}
.sf .stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.sf .stack tr{border-bottom:1px solid var(--line);padding:8px 0}
.sf .stack td{border:0;padding:1px 0;display:flex;justify-content:space-between;gap:14px;text-align:right;
white-space:normal}
.sf .stack td::before{content:attr(data-label);color:var(--quiet);font-size:13px;text-align:left;flex:none}
.sf .stack td:empty{display:none}
.sf .stack td:first-child{display:block;text-align:left}
.sf .stack td:first-child::before{content:none}
.sf .stack svg.share{width:120px}
}
@media print{
.sf{LIGHTcolor-scheme:light;background:#fff;font-size:12px;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body.sf{padding:0}
.sf section,.sf .card{break-inside:avoid}
.sf section.long{break-inside:auto}
.sf tr,.sf figure,.sf .states>details{break-inside:avoid}
.sf details::details-content{content-visibility:visible;display:block;height:auto}
.sf .graph{overflow:visible}.sf .graph.wide svg{max-width:100%}
}
"""

STYLE: Final = (_RULES.replace("LIGHT", _LIGHT).replace("DARK", _DARK)).replace("\n", "")
"""The style sheet, on one line."""
