"""The frame and the style sheet of all pages: one column, legible in light and dark and on paper.

The six colours are told apart by people with colour-vision deficiencies (after Okabe and Ito), darker on white and
lighter on black.
"""

from __future__ import annotations

from nvflare_plugins.formatting import markup

STYLE = """
:root { --bg:#fbfbfa; --card:#ffffff; --ink:#1c2024; --muted:#5d666f; --grid:#e4e7ea; --line:#d5d9dd;
  --good:#0b6b4f; --good-bg:#dff3ea; --warn:#8a5300; --warn-bg:#fdf0d5; --bad:#a3262a; --bad-bg:#fbe3e3;
  --c1:#0b6fb8; --c2:#d0670a; --c3:#159570; --c4:#b2558f; --c5:#c23b34; --c6:#8b949c; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171a; --card:#1c2024; --ink:#e8eaec; --muted:#a2abb3;
  --grid:#2c3237; --line:#384047; --good:#7fdcb6; --good-bg:#12382c; --warn:#f3c46b; --warn-bg:#3d2f10; --bad:#ff9d98;
  --bad-bg:#451d1e; --c1:#58b0ee; --c2:#f0a050; --c3:#4fd0a6; --c4:#e093c3; --c5:#f47f78; --c6:#7e8890; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:860px; margin:0 auto; padding:40px 20px 60px; }
h1 { font-size:30px; line-height:1.2; margin:0 0 14px; overflow-wrap:anywhere; letter-spacing:-.01em; }
h2 { font-size:19px; margin:0 0 14px; letter-spacing:-.005em; }
h3 { font-size:15px; margin:24px 0 8px; }
p { margin:0 0 12px; } ul { margin:0 0 12px; padding-left:20px; } li { margin-bottom:6px; }
.eyebrow { color:var(--muted); font-size:13px; margin-bottom:4px; } .lead { font-size:18px; margin-bottom:4px; }
.muted { color:var(--muted); font-size:14px; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:22px 24px 14px; margin-top:22px; }
.chip { display:inline-block; padding:2px 11px; border-radius:20px; font-size:13px; font-weight:600; margin-right:8px; }
.chip.good { color:var(--good); background:var(--good-bg); }
.chip.warn { color:var(--warn); background:var(--warn-bg); }
.chip.bad, td.bad { color:var(--bad); background:var(--bad-bg); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:12px; margin-top:18px; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 16px; }
.tile b { display:block; font-size:24px; font-weight:600; font-variant-numeric:tabular-nums; }
.tile span { color:var(--muted); font-size:13px; }
svg { display:block; width:100%; height:auto; margin:4px 0 12px; }
svg text { font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif; fill:var(--muted); }
svg .label { fill:var(--ink); font-size:13px; } svg .value { font-variant-numeric:tabular-nums; }
svg .grid { stroke:var(--grid); } svg .axis { stroke:var(--muted); }
svg .line { fill:none; stroke-width:2; stroke-linejoin:round; }
svg .wide { fill:none; stroke-width:9; stroke-opacity:.38; stroke-linejoin:round; stroke-linecap:round; }
svg .hit { fill:transparent; }
.legend { margin:0 0 6px; } .key { display:inline-block; margin-right:18px; font-size:14px; white-space:nowrap; }
.key i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:7px; vertical-align:-1px; }
table { border-collapse:collapse; width:100%; font-size:14px; margin-bottom:12px; }
th, td { text-align:left; vertical-align:top; padding:7px 12px 7px 0; border-bottom:1px solid var(--grid); }
tr:last-child > * { border-bottom:0; }
th { font-weight:600; }
th.n, td.n { text-align:right; white-space:nowrap; font-variant-numeric:tabular-nums; }
.threat th { width:190px; } .pairs th { font-weight:400; color:var(--muted); width:48%; overflow-wrap:anywhere; }
.pairs td { overflow-wrap:anywhere; font-variant-numeric:tabular-nums; } .scroll { overflow-x:auto; }
.columns { display:grid; grid-template-columns:repeat(auto-fit,minmax(330px,1fr)); gap:0 36px; }
.hash, code { font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace; font-size:12.5px; overflow-wrap:anywhere; }
.hash { color:var(--muted); } footer { color:var(--muted); font-size:13px; margin-top:26px; }
@media (max-width:560px) { main { padding:22px 12px; } section { padding:16px 14px 8px; } .key { white-space:normal; }
  section { overflow-x:auto; } svg { min-width:540px; }
  .messages :is(th, td):nth-child(2) { display:none; } .threat th { width:110px; } }
@media print { body { background:#fff; } section { break-inside:avoid; border-color:#ccc; } }
""".strip()

PRINTED = """
main { max-width:800px; padding:28px 20px 40px; } h1 { font-size:24px; margin-bottom:6px; } h2 { margin-bottom:8px; }
section { padding:14px 18px 6px; margin-top:14px; } body, .fine { font-size:14.5px; } .fine { color:var(--muted); }
.threat th { width:170px; } th, td { padding:5px 10px 5px 0; }
@page { size:A4; margin:10mm 14mm; }
@media print { :root { --ink:#000; --muted:#444; --card:#fff; --grid:#bbb; --line:#999; --bg:#fff; --bad:#a3262a;
    --bad-bg:#fff; --good:#0b6b4f; --good-bg:#fff; --warn:#8a5300; --warn-bg:#fff; }
  body { font-size:9pt; line-height:1.25; } main { max-width:none; padding:0; } h1 { font-size:15pt; }
  h2 { font-size:11pt; margin-bottom:3px; break-after:avoid; } table { font-size:8.5pt; margin:0 0 2px; }
  p { margin:0 0 4px; } th, td { padding:1.5px 8px 1.5px 0; } tr { break-inside:avoid; }
  .fine { font-size:8.5pt; margin:4px 0; }
  td .muted, td code { font-size:inherit; } section { border:0; border-top:1px solid #999;
    border-radius:0; padding:5px 0 2px; margin-top:5px; break-inside:auto; }
  footer { font-size:7.5pt; margin-top:4px; } .hash { font-size:inherit; } .chip { padding:0; } }
""".strip()
"""Added for a page that goes onto paper."""


def page(title: str, body: str, footer: str, more_style: str = "") -> str:
    """Return a whole page that loads nothing.

    Args:
        title: foreign text.
        body, footer: HTML whose foreign text is escaped already.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{markup(title)}</title><style>{STYLE}\n{more_style}</style></head>\n<body><main>\n{body}\n"
        f"<footer>{footer}</footer></main></body></html>\n"
    )
