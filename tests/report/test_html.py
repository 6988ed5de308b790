"""The page of ``srunddp report`` in a real browser, from a file, where no name can be resolved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing
from tests.support.made_up_run import MadeUp
from tests.support.starting import LONG, srunddp, write

pytestmark = pytest.mark.slow

RUN = MadeUp(
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
    seconds=60,
    epoch_s=20,
    script=("train.py", "--name=" + 300 * "x"),
)
# What it finds stands in the DOM of its own page, before that has loaded: the charts; the width of
# each image, 0 for one that could not be shown; what the page fetches; by how many pixels it is too
# wide; and which labels of a chart touch another in their row.
_LOOKING = """<!DOCTYPE html><body><pre id="found"></pre>
<iframe src="{page}" style="width: {width}px"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const touching = [];
  for (const chart of page.querySelectorAll("svg[role=img]")) {{
    const seen = [];
    for (const label of chart.querySelectorAll("text")) {{
      const box = label.getBoundingClientRect();
      if (!box.width) continue;
      if (seen.some(each => each.left < box.right && box.left < each.right
          && Math.abs(each.top - box.top) < 3)) touching.push(label.textContent);
      seen.push(box);
    }}
  }}
  document.getElementById("found").textContent = JSON.stringify({{
    charts: page.querySelectorAll("svg[role=img]").length,
    images: [...page.images].map(each => each.complete ? each.naturalWidth : 0),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(each => each.name),
    scripts: page.scripts.length,
    words: page.body.innerText,
    beyond: root.scrollWidth - root.clientWidth,
    touching,
  }});
}};
</script></body>"""


def load(page: Path, folder: Path, width: int = 1200) -> dict[str, Any]:
    """What a browser makes of a page: as ``_LOOKING`` has it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        missing("chromium")
    looking = write(folder / "looking.html", _LOOKING.format(page=page.as_uri(), width=width))
    command = [
        str(chromium),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", looking.as_uri()],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return dict(json.loads(unescape(found[1])))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    RUN.write(folder)
    assert srunddp("report", "4711.0", folder=folder).returncode == 0
    return folder / "4711.0" / "report.html"


@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_shows_the_whole_page_and_fetches_nothing(
    width: int, page: Path, tmp_path: Path
) -> None:
    """Also in a narrow window, in which a table too wide for it is moved and not the page."""
    found = load(page, tmp_path, width)
    assert found["charts"] > 10
    assert (found["requests"], found["scripts"], found["beyond"]) == ([], 0, 0)
    assert "Launch phases" in found["words"]
    assert found["touching"] == []


def test_labels_of_a_long_run_do_not_touch_in_a_narrow_window(tmp_path: Path) -> None:
    hours = MadeUp(nodes=1, ranks_per_node=2, seconds=7000, interval=50, epoch_s=900)
    folder = hours.write(tmp_path)
    assert srunddp("report", str(folder), folder=tmp_path).returncode == 0
    found = load(folder.parent / "report.html", tmp_path, 480)
    assert "90 min" in found["words"]
    assert found["touching"] == []


def test_what_a_page_would_fetch_is_noticed(tmp_path: Path) -> None:
    """The test above would notice."""
    image = (
        '<img src="https://example.org/one.png"><script></script><div style="width: 2000px">x</div>'
    )
    found = load(write(tmp_path / "page.html", f"<!DOCTYPE html><body>{image}</body>"), tmp_path)
    assert (found["images"], found["requests"], found["scripts"]) == (
        [0],
        ["https://example.org/one.png"],
        1,
    )
    assert found["beyond"] > 0
