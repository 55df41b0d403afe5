"""Pack verl with what it imports for a GPU machine without a package registry: one archive, Python 3.12 on x86-64.

    python bundle_verl.py [verl.tar.xz]

Run it where pip reaches PyPI, with torch and setuptools. It needs SGLang's packages on the GPU machine, which it does
not bring; torch, transformers, pandas and the like are expected there too. Left out for size: Ray's Java, its
dashboard's pages and its libraries (data, train, tune, serve, rllib, llm), Arrow's parts for clouds. Arrow itself
lies in a folder of its own, `spare`: for machines that have none. flash-attn brings one file, its cross entropy in
Triton: the rest of it would have to be compiled. TRL 1.16 must not lie beside it: verl imports a name of it that has
moved. There:

    mkdir /tmp/verl && xz -dc verl.tar.xz | tar x -C /tmp/verl && python3 -m compileall -q -j 0 /tmp/verl
    export PYTHONPATH=/tmp/verl/site:$PYTHONPATH        # and with :/tmp/verl/spare where pyarrow is none or before 24
    bench/gpu.sh peer_verl
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = (
    *("verl==0.9.1", "ray==2.60.0", "transferqueue==0.1.11", "tensordict==0.10.0", "pyvers<0.2", "torchdata==0.11.0"),
    *("hydra-core==1.3.8", "omegaconf<2.4", "datasets==5.2.0", "multiprocess<0.70.20", "codetiming", "pylatexenc"),
    *("cachetools", "importlib_metadata", "liger-kernel==0.8.5"),
)
SPARE_WHEELS = ("pyarrow==26.0.1",)
SOURCES = ("antlr4-python3-runtime==4.9.3",)
"""Pure Python, of which there is no wheel."""
FLASH_ATTENTION = "flash-attn==2.8.3"
CROSS_ENTROPY = "flash_attn/ops/triton/cross_entropy.py"
UNUSED = re.compile(
    r"ray/(jars|rllib|data|train|tune|serve|llm|cpp|dashboard/client)/|tests/|scripts/|recipe/|tutorial/|"
    r"pyarrow/(include|tests|src)/|pyarrow/(libarrow_(python_)?|_)(flight|s3|s3fs|gcsfs|azurefs|orc|hdfs)\b|"
    r"pyarrow/.*\.(pyx|pxi|pxd)$|pyarrow/_pyarrow_cpp_tests|.*\.map$"
)
MANYLINUX = (5, 17, 24, 26, 27, 28, 31, 34, 35, 39)
MOST_BYTES = 60_000_000


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=sys.stderr)


def download(wanted: tuple[str, ...], to: Path) -> None:
    platforms = [*(f"manylinux_2_{number}_x86_64" for number in MANYLINUX), "manylinux2014_x86_64", "any"]
    of_there = ["--python-version", "3.12", "--implementation", "cp", *(f"--platform={name}" for name in platforms)]
    pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(to), *of_there, *wanted)


def unpack(wheels: Path, to: Path) -> None:
    """A wheel for another machine cannot be installed here; it is a zip, and none of these needs more."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not UNUSED.match(member.filename):
                    path = archive.extract(member, to)
                    Path(path).chmod(0o755 if member.external_attr >> 16 & 0o100 else 0o644)
    for data in to.glob("*.data"):
        for library in ("purelib", "platlib"):
            if (data / library).is_dir():
                shutil.copytree(data / library, to, dirs_exist_ok=True)
        shutil.rmtree(data)


def cross_entropy(work: Path, to: Path) -> None:
    """That one file of flash-attn, in packages that are empty otherwise."""
    # told what it is by its own setup.py, which imports torch, and would compile if it were not told to skip that
    os.environ["FLASH_ATTENTION_SKIP_CUDA_BUILD"] = "TRUE"
    pip("download", "-q", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "-d", str(work), FLASH_ATTENTION)
    with tarfile.open(next(work.glob("flash_attn-*.tar.gz"))) as archive:
        name = next(name for name in archive.getnames() if name.endswith(CROSS_ENTROPY))
        source = archive.extractfile(name)
        assert source is not None
        target = to / CROSS_ENTROPY
        target.parent.mkdir(parents=True)
        target.write_bytes(source.read())
    for package in (target.parent, target.parent.parent, target.parent.parent.parent):
        (package / "__init__.py").touch()


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "verl.tar.xz").absolute()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, wanted in (("site", WHEELS), ("spare", SPARE_WHEELS)):
            download(wanted, work / f"{name}_wheels")
            if name == "site":
                pip("wheel", "-q", "--no-deps", "-w", str(work / "site_wheels"), *SOURCES)
            unpack(work / f"{name}_wheels", work / "verl" / name)
        cross_entropy(work, work / "verl" / "site")
        with out.open("wb") as file:
            tar = subprocess.Popen(["tar", "c", "--owner=0", "-C", str(work / "verl"), "."], stdout=subprocess.PIPE)
            subprocess.run(["xz", "-6", "-T0"], stdin=tar.stdout, stdout=file, check=True)
            if tar.wait():
                sys.exit("tar failed")
    size = out.stat().st_size
    print(f"{out}: {size:,} bytes")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES:,} bytes: leave out more")


if __name__ == "__main__":
    main()
