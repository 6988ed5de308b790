"""How the report page looks: CSS variables with the colours, for light and dark, and the rules for charts."""

from __future__ import annotations

from collections.abc import Sequence

LEVELS = 16  # colours of a heat map
# Okabe and Ito's colours, which the colour-blind tell apart. Blue comes late on black, where it is weak.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#a6a6a6", "#4d4d4d")
_DARK = ("#56b4e9", "#e69f00", "#1fc195", "#cc79a7", "#f0e442", "#f0804a", "#d9d9d9", "#3d8fd1")
# A heat map begins with a colour like that of the page and ends with one that stands out.
_LIGHT_SCALE = ((233, 242, 248), (116, 178, 214), (25, 101, 176), (58, 14, 82))
_DARK_SCALE = ((27, 37, 52), (20, 88, 132), (86, 180, 160), (255, 240, 140))


def _colours(lines: Sequence[str], stops: Sequence[tuple[int, int, int]]) -> str:
    """CSS variables: ``--c0`` and so on for lines, ``--h0`` and so on for heat maps."""
    found = {f"--c{number}": colour for number, colour in enumerate(lines)}
    for level in range(LEVELS):
        number, part = divmod(level * (len(stops) - 1) / (LEVELS - 1), 1)
        ends = stops[int(number)], stops[min(int(number) + 1, len(stops) - 1)]
        found[f"--h{level}"] = "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))
    return " ".join(f"{name}: {colour};" for name, colour in found.items())


STYLE = f"""
:root {{ color-scheme: light; --page: #fff; --text: #1a1a1a; --soft: #5a5a5a; --grid: #e3e3e3; --missing: #d9d5cd;
  {_colours(_LIGHT, _LIGHT_SCALE)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; --page: #131516; --text: #e6e6e6;
  --soft: #a8a8a8; --grid: #34383b; --missing: #4d4942; {_colours(_DARK, _DARK_SCALE)} }} }}
.chart {{ margin: 1.6em 0 0; break-inside: avoid; font-size: 12px; color: var(--soft); }}
.chart figcaption {{ display: flex; flex-wrap: wrap; gap: 0 1.2em; align-items: baseline; }}
.chart b {{ font-size: 14px; font-weight: 600; color: var(--text); }}
.chart span svg {{ height: 10px; margin-right: 5px; }}
.chart > svg {{ display: block; width: calc(100% - 96px); margin: 20px 22px 24px 74px; }}
.chart svg {{ overflow: visible; }}
.chart text {{ font-size: 11px; fill: var(--soft); dominant-baseline: central; text-anchor: middle; }}
.chart text.y {{ text-anchor: end; }}
.chart text.marked {{ fill: var(--c1); font-weight: 700; }}
.chart line {{ stroke: var(--grid); pointer-events: none; }}
.chart line.mark {{ stroke: var(--soft); stroke-dasharray: 1 3; }}
.chart path {{ fill: currentColor; vector-effect: non-scaling-stroke; }}
.chart path.line {{ fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linecap: round; }}
.chart path.dot {{ stroke-width: 5; }}
.chart path.band {{ opacity: .25; }}
.chart path.cell {{ shape-rendering: crispEdges; }}
.chart path.marked {{ fill: none; stroke: var(--c1); stroke-width: 1.5; }}
.chart .hover path {{ fill: transparent; }}
.chart .hover path:hover {{ fill: var(--text); opacity: .2; }}
.missing {{ color: var(--missing); }}
{" ".join(f".c{at} {{ color: var(--c{at}); }}" for at in range(len(_LIGHT)))}
{" ".join(f".h{at} {{ color: var(--h{at}); }}" for at in range(LEVELS))}
"""
