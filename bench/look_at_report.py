"""Take pictures of a report in a real browser: `python bench/look_at_report.py [RUN] [--out FOLDER]`.

Without RUN it plants one. Needs Chromium (Debian: `apt-get install chromium`). Writes light, dark, narrow and a page
without JavaScript; looking at them is up to you.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import BROWSERS, QUIET, find_browser
from planted_run import plant_changes, plant_run

from myxa.launch.views.report import write_report

PICTURES = {
    "light": ("--window-size=1400,4200",),
    "dark": ("--window-size=1400,4200", "--force-dark-mode", "--blink-settings=preferredColorScheme=0"),
    "narrow": ("--window-size=560,6800",),
    "no-script": ("--window-size=1400,4200",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "myxa-report")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.run or plant_run(Path(folder) / "sort-planted")
        if options.run is None:
            plant_changes(run_dir)
        page = write_report(run_dir, options.out / "report.html").resolve()
    bare = options.out / "report-without-script.html"
    bare.write_text(page.read_text().partition("<script>")[0] + "</body></html>")
    for name, flags in PICTURES.items():
        shown = bare.resolve() if name == "no-script" else page
        picture = options.out / f"{name}.png"
        with tempfile.TemporaryDirectory() as profile:
            command = [
                browser,
                "--headless",
                *QUIET,
                f"--user-data-dir={profile}",
                f"--screenshot={picture}",
                *flags,
                shown.as_uri(),
            ]
            subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
