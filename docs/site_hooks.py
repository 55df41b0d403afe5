"""Hooks of mkdocs: the site has the folders of the repository, so a link that holds on a code host holds in it too.

Pages are README.md, docs/*.md and the pages of examples/. A file or folder that one of them links to gets a page with
its text. The order is that of docs/README.md. The pages in api/ are made from docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOREIGN = re.compile(
    r"<(?:script|img|iframe|link rel=.?(?:stylesheet|preload|icon))[^>]*(?:src|href)=.?(?://|https?:)[^>]*>"
)
API: dict[str, tuple[str, ...]] = {
    "Workflows": (
        "myxa.actors.workflows.episode.WorkflowContext",
        "myxa.actors.workflows.episode.Episode",
        "myxa.actors.workflows.episode.Turn",
        "myxa.actors.workflows.failures",
        "myxa.core.samples.Prompt",
        "myxa.core.samples.Message",
        "myxa.core.samples.Sample",
        "myxa.core.samples.Group",
    ),
    "Rewards": ("myxa.core.completions.Completion", "myxa.algos.rewards.builtin"),
    "Environments": ("myxa.actors.environments.session.Environment",),
    "Sinks": ("myxa.core.sink",),
    "Algorithms": (
        "myxa.algos.objective.LossTokens",
        "myxa.algos.ratios.Segments",
        "myxa.algos.losses",
        "myxa.algos.advantages",
    ),
    "Embedding": (
        "myxa.launch.embed.rollout_in",
        "myxa.launch.embed.EmbeddedRollout",
        "myxa.launch.embed.EmbeddedStatus",
        "myxa.transport.node.Node",
        "myxa.core.actor",
        "myxa.core.refs.together",
    ),
}
"""Page -> the objects that code of a user's own is written against."""


def on_config(config: Any) -> Any:
    """The order of pages, from docs/README.md."""
    index = (ROOT / "docs/README.md").read_text().partition("## Glossary")[0]
    nav: list[Any] = []
    for group in re.split(r"^\*\*(.+)\*\*$", index, flags=re.MULTILINE)[1:]:
        pages = [repository_path("docs/README.md", link[1]) for link in LINK.finditer(group) if link[1].endswith(".md")]
        nav.append({nav.pop(): pages} if pages else group)
    nav[0] = {"Start": ["README.md", "docs/README.md", *next(iter(nav[0].values()))[1:]]}
    examples = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/README.md"))
    nav.append({"Examples": ["examples/README.md", *examples]})
    nav.append({"API": [api_page(title) for title in API]})
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    del files
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("README.md")]
    made = {str(path.relative_to(ROOT)): path.read_text() for path in pages}
    for source in sorted(sources(made)):
        made[f"{source}.md"] = source_page(source)
    for title, names in API.items():
        made[api_page(title)] = "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)])
    return Files([File.generated(config, path, content=text) for path, text in made.items()])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to folders lead to their pages, links to sources to the pages made of them."""

    def to_page(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = repository_path(page.file.src_uri, target)
        if (ROOT / path).is_dir():
            kind = "/README.md" if (ROOT / path / "README.md").exists() else ".md"
            return f"{target.rstrip('/')}{kind}{anchor}"
        return f"{target}{'' if target.endswith('.md') else '.md'}{anchor}"

    return outside_code(re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE), to_page)


def on_post_build(config: Any) -> None:
    """A page that loads something from another host fails the build."""
    for path in Path(config.site_dir).rglob("*.html"):
        if found := FOREIGN.search(path.read_text()):
            raise PluginError(f"{path.name} loads from another host: {found[0]}")


def repository_path(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def api_page(title: str) -> str:
    return f"api/{title.lower()}.md"


def outside_code(markdown: str, change: Any) -> str:
    """The page with its links changed, but for those in blocks of code."""
    done, end = [], 0
    for block in CODE.finditer(markdown):
        done += [LINK.sub(change, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*done, LINK.sub(change, markdown[end:])])


def sources(pages: dict[str, str]) -> set[str]:
    """What pages link to that is no page."""
    found = {
        repository_path(page, link[1]) for page, text in pages.items() for link in LINK.finditer(CODE.sub("", text))
    }
    return {path for path in found - pages.keys() if f"{path}/README.md" not in pages}


def source_page(path: str) -> str:
    place = ROOT / path
    if place.is_dir():
        names = sorted(f"{inner.name}{'/' * inner.is_dir()}" for inner in place.iterdir() if inner.name[0] not in "._")
        return "\n".join([f"# {path}/", "", *(f"* `{name}`" for name in names)])
    return f"# {path}\n\n`````{place.suffix.lstrip('.')}\n{place.read_text().rstrip()}\n`````\n"
