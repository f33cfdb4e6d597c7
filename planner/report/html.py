"""One HTML file that opens offline: no address in it, no font, no script from outside.

``page.js`` draws with SVG and one canvas; the data stands in the file as JSON.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files

from planner.plan.documents import Document
from planner.report.data import page_data

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>The figures are drawn by a script in this file: allow it to run.</noscript>
<main id="page"></main>
<div id="tip" role="tooltip"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(document: Document, *, reprice: bool = True) -> str:
    """The whole page. ``reprice``: build the model again to price its ops."""
    data = page_data(document, reprice)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, sort_keys=True)
    folder = files("planner.report")
    return _PAGE.format(
        title=html.escape(data["title"]),
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=folder.joinpath("page.js").read_text(encoding="utf-8"),
        data=text.replace("<", "\\u003c").replace("&", "\\u0026"),
    )
