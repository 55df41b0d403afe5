"""`myxa top`: the run in a terminal, to look at and to set knobs.

Everything that may block runs in threads, which send messages to the application.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar, cast

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Static, TabbedContent, TabPane, Tree

from ...core.errors import MyxaError
from ..views.knob_table import KNOB_COLUMNS, KnobRow, knob_rows
from ..views.numbers import clean
from ..views.run_page import run_page
from ..views.run_view import RunView, notice_text, title_text
from . import pages
from .feed import Feed
from .knob_screen import KnobScreen


class Seen(Message):
    """A thread took a look."""

    def __init__(self, view: RunView) -> None:
        super().__init__()
        self.view = view


class Read(Message):
    """A thread read a text for one of the pages."""

    def __init__(self, page: str, actor: str, text: str) -> None:
        super().__init__()
        self.page = page
        self.actor = actor
        self.text = text


def page_body(name: str) -> ComposeResult:
    if name in ("knobs", "history"):
        table: DataTable[str] = DataTable(id={"knobs": "knob-table", "history": "history-table"}[name])
        table.cursor_type = "row"
        yield table
        return
    with VerticalScroll(id=f"{name}-scroll", can_focus=False):
        yield Static(id=f"{name}-text")


def fill(table: DataTable[str], lines: list[tuple[str, ...]]) -> None:
    """New content; the cursor stays on the row that it was on. Keys are the first cell without its mark."""
    wanted = {line[0].strip(" *"): line for line in lines}
    if list(wanted) == [str(key.value) for key in table.rows]:
        for key, line in wanted.items():
            if [str(cell) for cell in table.get_row(key)] != list(line):
                for column, cell in zip(table.columns, line, strict=True):
                    table.update_cell(key, column, Text(cell), update_width=True)  # pyright: ignore[reportArgumentType]
        return
    kept = table.cursor_row
    table.clear()
    for key, line in wanted.items():
        table.add_row(*(Text(cell) for cell in line), key=key)  # pyright: ignore[reportArgumentType]
    table.move_cursor(row=min(kept, max(0, len(wanted) - 1)))


LOOK_EVERY_S = 1.0
LOG_LINES = 300
_TABS = (
    ("run", "Run"),
    ("actor", "Actor"),
    ("knobs", "Knobs"),
    ("history", "History"),
    ("log", "Log"),
    ("stack", "Stack"),
)
_ROOMY = 110
"""Columns from which on tree and tables fit beside each other."""
_OWN_FOCUS = {"knobs": "#knob-table", "history": "#history-table"}
"""Tabs in which the arrow keys move in the page; in the others they choose an actor."""


class TopApp(App[None]):
    """The application: title and verdict, the tree of actors, six pages."""

    TITLE = "myxa top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"page('{name}')", title, show=False) for n, (name, title) in enumerate(_TABS, 1)),
        Binding("q", "quit", "quit"),
        Binding("question_mark", "help", "help"),
        Binding("r", "refresh", "refresh"),
        Binding("f", "follow", "follow log"),
        Binding("t", "tree", "tree"),
        Binding("p", "pause", "pause or resume"),
        Binding("pagedown,space", "turn_page(1)", "down", priority=True),
        Binding("pageup", "turn_page(-1)", "up", priority=True),
    ]
    CSS = """
    Screen { layout: vertical; }
    #title { height: 1; padding: 0 1; }
    #why { height: auto; max-height: 3; padding: 0 1; text-style: italic; }
    #notice { height: auto; max-height: 2; padding: 0 1; color: $warning; text-style: bold; }
    #body { height: 1fr; }
    #keys { height: 1; padding: 0 1; text-style: reverse; }
    #tree { width: 30; min-width: 26; border-right: solid $surface-lighten-2; background: transparent; }
    #tree > .tree--cursor { text-style: reverse; }
    #tabs { width: 1fr; }
    TabPane { padding: 0 1; }
    DataTable { height: 1fr; background: transparent; }
    DataTable > .datatable--cursor { text-style: reverse; }
    #body.-roomy #tree { width: 48; }
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._run_view: RunView | None = None
        self._actor = ""
        self._tree_key: tuple[tuple[int, str], ...] = ()
        self._knob_rows: dict[str, KnobRow] = {}
        self._follows = True
        self._log_of = ""
        self._shows_tree: bool | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="why")
        yield Static(id="notice")
        with Horizontal(id="body"):
            tree: Tree[str] = Tree("run", id="tree")
            tree.show_root = False
            tree.guide_depth = 2
            yield tree
            with TabbedContent(id="tabs"):
                for name, title in _TABS:
                    with TabPane(title, id=name):
                        yield from page_body(name)
        yield Static(id="keys")

    def on_mount(self) -> None:
        self._page.query_one("#title", Static).update("myxa top: asking the run ...")
        self._table("knob-table").add_columns(*KNOB_COLUMNS, "what it does")
        self._table("history-table").add_columns(*pages.HISTORY_COLUMNS)
        self._page.query_one("#tree").focus()
        _start(self._look_forever)
        _start(self._read_logs_forever)

    def on_unmount(self) -> None:
        self._feed.close()

    def _look_forever(self) -> None:
        while not self._feed.is_closed:
            started_s = time.monotonic()
            view = self._feed.look()
            self.post_message(Seen(view))
            self._feed.wait(max(0.0, LOOK_EVERY_S - (time.monotonic() - started_s)))

    @on(Seen)
    def seen(self, event: Seen) -> None:
        if self.is_running:  # not while the widgets are being taken away: this may have waited in the queue
            self.show(event.view)

    def show(self, view: RunView) -> None:
        self._run_view = view
        self._page.query_one("#title", Static).update(Text(title_text(view), style="bold"))
        self._page.query_one("#why", Static).update(Text(clean(view.why)))
        notice = notice_text(view)
        line = self._page.query_one("#notice", Static)
        line.update(Text(notice))
        line.display = bool(notice)
        self._show_tree(view)
        self._show_page()
        fill(self._table("history-table"), pages.history_rows(view.history))
        self._knob_rows = {row.name: row for row in knob_rows(view.knobs)}
        fill(self._table("knob-table"), [(*row.cells(), clean(row.tunable.help)) for row in self._knob_rows.values()])

    @property
    def _page(self) -> Screen[object]:
        """What lies below the window of a knob, too."""
        return self.screen_stack[0]

    def _table(self, name: str) -> DataTable[str]:
        return cast("DataTable[str]", self._page.query_one(f"#{name}"))

    def _show_page(self) -> None:
        if self._run_view is None or not self.is_running:
            return
        width = max(40, self._page.query_one("#tabs").size.width - 5)
        page = run_page(self._run_view, width)
        self._page.query_one("#run-text", Static).update(page)
        self._page.query_one("#actor-text", Static).update(pages.actor_page(self._run_view, self._actor, width))

    def _show_tree(self, view: RunView) -> None:
        tree = cast("Tree[str]", self._page.query_one("#tree"))
        key = tuple((actor.node, actor.name) for actor in view.actors)
        if key != self._tree_key:
            self._tree_key = key
            self._build_tree(tree, view)
        facts = {actor.name: actor for actor in view.actors}
        width = tree.size.width - 5
        for node in tree.root.children:
            for leaf in node.children:
                if leaf.data in facts:
                    leaf.set_label(pages.actor_label(facts[leaf.data], view, width))

    def _build_tree(self, tree: Tree[str], view: RunView) -> None:
        tree.clear()
        chosen = None
        for number in sorted({actor.node for actor in view.actors}):
            mine = [actor for actor in view.actors if actor.node == number]
            node = tree.root.add(Text(pages.node_label(number, mine), style="bold"), expand=True)
            for actor in mine:
                leaf = node.add_leaf(actor.name, data=actor.name)
                if chosen is None or actor.name == self._actor:
                    chosen = leaf
        if chosen is not None:
            self._actor = chosen.data or ""
            self.call_after_refresh(tree.move_cursor, chosen)

    @on(Tree.NodeHighlighted)
    def choose(self, event: Tree.NodeHighlighted[str]) -> None:
        if self.is_running and event.node.data and event.node.data != self._actor:
            self._actor = event.node.data
            self._show_page()
            self._say("log", f"asking for the log of {self._actor} ...")
            self._say("stack", f"r asks {self._actor} for its stack")
            self._look_for_log()

    def action_page(self, name: str) -> None:
        self._tabs().active = name
        self._give_focus()

    def _give_focus(self) -> None:
        """After the refresh: a widget that is not displayed takes no focus."""
        target = self._page.query_one(_OWN_FOCUS.get(self._tabs().active, "#tree"))
        self.call_after_refresh(target.focus)

    def _tabs(self) -> TabbedContent:
        return self._page.query_one("#tabs", TabbedContent)

    @on(TabbedContent.TabActivated)
    def activated(self, event: TabbedContent.TabActivated) -> None:
        if not self.is_running:
            return
        if event.pane.id == "stack":
            self._read_stack(self._actor)
        self._look_for_log()
        self._fit()
        self._give_focus()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        if not self.is_running:
            return
        page = self._tabs().active
        self._page.query_one("#body").set_class(self.size.width >= _ROOMY, "-roomy")
        has_room = self.size.width >= _ROOMY or page not in _OWN_FOCUS
        self._page.query_one("#tree").display = has_room if self._shows_tree is None else self._shows_tree
        self._page.query_one("#keys", Static).update(Text(pages.help_text(page)))
        self.call_after_refresh(self._show_page)

    def action_help(self) -> None:
        self.notify(pages.HELP, title="myxa top", timeout=20)

    def action_turn_page(self, direction: int) -> None:
        page = self._tabs().active
        if page in _OWN_FOCUS:
            table = self._table(f"{'knob' if page == 'knobs' else page}-table")
            table.move_cursor(row=table.cursor_row + direction * max(1, table.size.height - 2))
            return
        scroll = self._page.query_one(f"#{page}-scroll", VerticalScroll)
        scroll.scroll_relative(y=direction * max(1, scroll.size.height - 1), animate=False)

    @on(Tree.NodeSelected)
    def look_at(self, event: Tree.NodeSelected[str]) -> None:
        if event.node.data and self._tabs().active == "run":
            self.action_page("actor")

    def action_refresh(self) -> None:
        if self._tabs().active == "stack":
            self._read_stack(self._actor)
        self._feed.wake()

    def action_follow(self) -> None:
        self._follows = not self._follows
        self._look_for_log()
        self.notify("the log is followed" if self._follows else "the log is held; f follows it again")

    def action_tree(self) -> None:
        self._shows_tree = not self._page.query_one("#tree").display
        self._fit()

    def action_pause(self) -> None:
        status = self._run_view.status if self._run_view is not None else None
        if status is None or self._feed.reader_only:
            self.notify("no socket within reach can pause the run", severity="warning")
            return
        verb = "resume" if status.paused else "pause"
        _start(lambda: self._ask_verb(verb))

    def _ask_verb(self, verb: str) -> None:
        said = _answer(lambda: pages.done_words(verb, self._feed.ask(verb, reason="myxa top")))
        self.post_message(Read("", "", said))
        self._feed.wake()

    @on(DataTable.RowSelected, "#knob-table")
    def turn(self, event: DataTable.RowSelected) -> None:
        row = self._knob_rows.get(str(event.row_key.value))
        if row is None or self._run_view is None:
            return
        if self._run_view.has_ended:
            self.notify("the run has ended: nothing can be set any more", severity="warning")
        elif self._feed.reader_only:
            self.notify(
                "only the read-only socket is within reach: ask the user that started the run", severity="warning"
            )
        else:
            self.push_screen(KnobScreen(row, self._feed.set), self._turned)

    def _turned(self, said: str | None) -> None:
        if said:
            self.notify(said, timeout=8)
        self._feed.wake()

    def _read_logs_forever(self) -> None:
        while not self._feed.is_closed:
            name = self._log_of
            if name:
                text = _answer(
                    lambda name=name: pages.log_text(self._feed.ask("logs", target=name, num_lines=LOG_LINES))
                )
                self.post_message(Read("log", name, text))
            self._feed.wait(LOOK_EVERY_S)

    def _read_stack(self, name: str) -> None:
        if name:
            self._say("stack", f"asking {name} for its stack ...")
            _start(lambda: self._ask_stack(name))

    def _ask_stack(self, name: str) -> None:
        text = _answer(lambda: pages.stack_text(self._feed.ask("stack", timeout_s=30.0, target=name)))
        self.post_message(Read("stack", name, text))

    @on(Read)
    def read(self, event: Read) -> None:
        if not self.is_running:
            return
        if not event.page:
            self.notify(event.text)
            return
        if event.actor != self._actor:
            return
        self._say(event.page, event.text)
        if event.page == "log" and self._follows:
            self._page.query_one("#log-scroll", VerticalScroll).scroll_end(animate=False)

    def _say(self, page: str, text: str) -> None:
        self._page.query_one(f"#{page}-text", Static).update(Text(text))

    def _look_for_log(self) -> None:
        """Logs are read only while their page is shown."""
        is_seen = self._tabs().active == "log" and self._follows
        self._log_of = self._actor if is_seen else ""
        self._feed.wake()


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (MyxaError, OSError, ValueError) as error:
        return str(error)


def _start(work: Callable[[], None]) -> None:
    """Not textual's thread workers: those are waited for at the end, also when the run that they ask hangs."""
    threading.Thread(target=work, daemon=True, name="myxa-top").start()
