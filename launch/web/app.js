// The dashboard's page. Everything that the run sends is put in as text (textContent, setAttribute), never as markup.
import { duration, el, lineChart, timeStrip } from "./plots.js";
import { setColour, setGroups } from "./samples.js";

const $ = (id) => document.getElementById(id);
const PAGES = ["overview", "learning", "speed", "time", "knobs", "events", "samples"];
const OVERVIEW = ["Reward", "Lag of the trained groups (versions)", "Tokens per second", "Loss"];
const ALARMING = /fail|error|gone|fenced|non-finite|drop|disabled|killed|restart|full|hung|suspect|refused/;
const BADGES = { running: "good", finished: "good", failed: "bad" };
let state = null, past = null, page = "overview", turning = null, drawn = {};

const token = takeToken();

function takeToken() {
  const url = new URL(location.href);
  const given = url.searchParams.get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", url.pathname + url.hash); // the secret stays out of the address bar and its history
  }
  return given ?? sessionStorage.getItem("token") ?? "";
}

// -- live ------------------------------------------------------------------------------------------------------------

function listen() {
  const source = new EventSource("/api/live");
  source.addEventListener("open", () => setLink("on", "live"));
  source.addEventListener("error", () => setLink("off", source.readyState === EventSource.CLOSED ? "the dashboard has ended, or the secret is not known: open the printed URL" : "reconnecting"));
  source.addEventListener("state", (event) => { state = JSON.parse(event.data); drawState(); });
  source.addEventListener("history", (event) => { past = JSON.parse(event.data); drawn = {}; drawPage(); });
}

function setLink(css, words) {
  $("link").className = `link ${css}`;
  $("link").textContent = words;
}

// -- the head, on every page -----------------------------------------------------------------------------------------

function drawState() {
  document.title = `${state.name || "run"} - myxa`;
  $("name").textContent = state.name || "a run";
  $("phase").textContent = state.phase;
  $("phase").className = `badge ${BADGES[state.phase] ?? "open"}`;
  $("notice").textContent = state.notice;
  $("notice").hidden = !state.notice;
  $("notice").classList.toggle("bad", state.isSilent || state.phase === "failed");
  $("why").textContent = state.why || "nothing is known yet";
  $("remedy").textContent = state.remedy ? `To try: ${state.remedy}.` : "";
  $("tiles").replaceChildren(...state.tiles.map((tile) =>
    el("div", { class: "tile" }, el("span", { class: "label" }, tile.label), el("span", { class: "figure" }, tile.value), el("span", { class: "note", title: tile.note }, tile.note))));
  if (page === "overview") drawOverview();
  if (page === "knobs") drawKnobs();
}

function drawPage() {
  for (const name of PAGES) $(name).hidden = name !== page;
  for (const link of $("nav").children) link.toggleAttribute("aria-current", link.hash === `#${page}`);
  if (state) drawState();
  if (!past) return;
  ({ overview: () => charts("overview"), learning: () => charts("learning"), speed: () => charts("speed"), time: drawTime, knobs: drawChanges, events: drawEvents, samples: () => {} })[page]();
}

function charts(name) {
  if (drawn[name]) return;
  drawn[name] = true;
  const wanted = name === "overview"
    ? OVERVIEW.map((title) => past.charts.find((c) => c.title === title)).filter(Boolean)
    : past.charts.filter((c) => c.page === name || (name === "learning" && c.page === "staleness"));
  const box = $(`charts-${name}`);
  box.replaceChildren(...wanted.map((chart) => lineChart(chart, past.startWall, past.changes)));
  if (!wanted.length && name !== "overview") box.append(el("p", { class: "empty" }, "No training step was reported yet."));
  const legend = $(name).querySelector("[data-legend]");
  if (legend) legend.replaceChildren(...changeLegend());
}

function changeLegend() {
  const done = past.changes.filter((c) => c.result === "done").slice(-8);
  if (!done.length) return [];
  const items = done.map((c) => el("li", { value: c.number }, `${c.what}${c.who ? ` by ${c.who}` : ""}${c.reason ? ` (${c.reason})` : ""}`));
  return [el("details", { class: "card", open: "" }, el("summary", {}, "Vertical lines: changes made while running"), el("ol", {}, ...items))];
}

// -- overview --------------------------------------------------------------------------------------------------------

function drawOverview() {
  $("kinds").replaceChildren(...kindKeys());
  const rows = [];
  let node = null;
  for (const actor of state.actors) {
    if (actor.node !== node) rows.push(el("p", { class: "nodename" }, `node ${actor.node}  ${actor.host}`));
    node = actor.node;
    rows.push(actorRow(actor));
  }
  $("actors").replaceChildren(...(rows.length ? rows : [el("p", { class: "empty" }, "No actor is known.")]));
  $("done").textContent = dotted(state.done);
  $("queues").replaceChildren(...state.queues.map((q) => countRow(q.label, q.count, q.total, q.label === "slots" ? `${q.count} of ${q.total}` : String(q.count))));
  $("lagtext").textContent = state.lags.bars.length ? `groups of the last ${state.lags.numSteps} steps by lag; newest: ${dotted(state.lags.text)}` : "no lag was reported yet";
  const most = Math.max(1, ...state.lags.bars.map((b) => b.count));
  const edge = state.lags.bars.findLastIndex((b) => b.isAllowed);
  $("lags").replaceChildren(...state.lags.bars.map((b, i) => countRow(`lag ${b.lag}`, b.count, most, String(b.count), `${b.isAllowed ? "" : "over"}${i === edge ? " edge" : ""}`)));
  $("engines").replaceChildren(state.engines.rows.length ? table(state.engines.columns, state.engines.rows) : el("p", { class: "empty" }, "No engine serves."));
}

const dotted = (words) => words.replace(/ {3}/g, " \u00b7 ");

function kindKeys() {
  return state.kinds.map((kind) => el("span", { class: `key k-${kind}` }, kind));
}

function actorRow(actor) {
  const bar = el("div", { class: "bar" }, ...actor.shares.map((share, i) => wide(el("span", { class: `k-${state.kinds[i]}`, title: state.kinds[i] }), share)));
  const parts = actor.parts.filter((part) => !part.includes("/")).join(" \u00b7 ");
  const words = actor.isWell ? parts || "its time is not reported yet" : actor.state;
  return el("div", { class: `actor${actor.isWell ? "" : " ill"}`, title: `pid ${actor.pid}, ${actor.state}\n${actor.parts.join("\n")}` },
    el("span", { class: "who" }, actor.name), bar, el("span", { class: "barnote" }, words));
}

function wide(node, share) {
  node.style.width = `${share * 100}%`;
  return node;
}

function countRow(label, count, total, words, css = "") {
  return el("div", { class: `row ${css}` }, el("span", {}, label), el("div", { class: "bar" }, wide(el("span"), total > 0 ? Math.min(1, count / total) : 0)), el("span", { class: "num" }, words));
}

function table(columns, rows) {
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col" }, c)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}

// -- time ------------------------------------------------------------------------------------------------------------

function drawTime() {
  if (drawn.time || !state) return;
  drawn.time = true;
  $("kinds-time").replaceChildren(...kindKeys());
  const ends = past.time.flatMap((strip) => (strip.bins.length ? [strip.bins.at(-1)[0] + strip.width_s] : []));
  const starts = past.time.flatMap((strip) => (strip.bins.length ? [strip.bins[0][0]] : []));
  const shown = past.time.filter((strip) => strip.bins.length);
  $("time-charts").replaceChildren(...shown.map((strip, i) => timeStrip(strip, state.kinds, Math.min(...starts), Math.max(...ends), i === shown.length - 1)));
  if (!shown.length) $("time-charts").append(el("p", { class: "empty" }, "No actor reported its time yet."));
}

// -- knobs -----------------------------------------------------------------------------------------------------------

function drawKnobs() {
  const note = state.mayOperate ? "A change is made by all owners at one boundary, or nowhere." : "This dashboard only shows; myxa set, myxa top or myxa dashboard --operate turn knobs.";
  $("knob-note").textContent = state.hasEnded ? "The run has ended: this is how its knobs were last seen." : note;
  $("run-verbs").hidden = !state.mayOperate;
  const columns = ["knob", "value", "run file", "takes", "at next", "owner", "what it does", ...(state.mayOperate ? [""] : [])];
  const key = JSON.stringify([state.knobs, state.mayOperate]);
  if (drawn.knobs === key) return;
  drawn.knobs = key;
  $("knob-table").replaceChildren(head(columns), el("tbody", {}, ...state.knobs.map(knobRow)));
  if (!state.knobs.length) $("knob-table").append(el("caption", {}, "No knob is known."));
}

function knobRow(knob) {
  const value = `${knob.value}${knob.unit ? ` ${knob.unit}` : ""}${knob.pending ? ` -> ${knob.pending}` : ""}${knob.reverts ? ` (goes back ${knob.reverts})` : ""}`;
  const cells = [[knob.name, "strong nowrap"], [value, knob.isChanged ? "changed" : ""], [knob.first, "soft"], [knob.takes, "soft"], [knob.boundary, "soft"], [knob.owner, "soft nowrap"], [knob.help, "soft"]];
  const row = el("tr", {}, ...cells.map(([words, css]) => el("td", { class: css }, words)));
  if (state.mayOperate) {
    const button = el("button", { type: "button", class: "action", "aria-label": `turn ${knob.name}` }, "turn");
    button.addEventListener("click", () => openTurn(knob));
    row.append(el("td", {}, button));
  }
  return row;
}

const head = (columns) => el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col" }, c))));

function drawChanges() {
  const rows = [...past.changes].reverse().map((c) => el("tr", { class: ["done", "nothing to do"].includes(c.result) ? "" : "alarm" },
    el("td", { class: "number" }, String(c.number)), el("td", { class: "nowrap" }, since(c.wall_s)), el("td", { class: "nowrap" }, c.step >= 0 ? String(c.step) : ""),
    el("td", {}, c.what), el("td", {}, c.who), el("td", {}, c.reason), el("td", {}, c.detail && c.result !== "done" ? `${c.result}: ${c.detail}` : c.result)));
  $("change-table").replaceChildren(head(["no.", "after", "step", "what", "who", "reason", "result"]), el("tbody", {}, ...rows));
  if (!rows.length) $("change-table").append(el("caption", {}, "Nothing was changed yet."));
}

const since = (wall) => duration(Math.max(0, wall - past.startWall));

function openTurn(knob) {
  turning = knob;
  $("turn-name").textContent = knob.name;
  $("turn-help").textContent = `${knob.help} Limits: ${knob.takes}${knob.unit ? ` (${knob.unit})` : ""}. In force at: ${knob.boundary}. The run file said ${knob.first}.`;
  $("turn-value").value = knob.raw;
  $("turn-reason").value = $("turn-steps").value = "";
  say("", false);
  $("turn").showModal();
  $("turn-value").select();
}

function say(words, isBad) {
  $("turn-said").textContent = words;
  $("turn-said").classList.toggle("bad", isBad);
}

function typed(knob, words) {
  if (knob.kind === "int" || knob.kind === "float") return words.trim() === "" ? words : Number(words);
  return knob.kind === "bool" ? { true: true, false: false }[words.trim().toLowerCase()] ?? words : words.trim();
}

async function turn() {
  const value = typed(turning, $("turn-value").value), steps = $("turn-steps").value.trim();
  if (typeof value === "number" && !Number.isFinite(value)) return say(`${$("turn-value").value} is no number`, true);
  if (steps && !/^\d+$/.test(steps)) return say("steps must be a whole number, or empty", true);
  $("turn-set").disabled = true;
  say("asking the run ...", false);
  try {
    const reply = await operate("set", { values: { [turning.name]: value }, reason: $("turn-reason").value, ...(steps ? { for_steps: Number(steps) } : {}) });
    if (reply.refused) say(`refused: ${reply.refused}`, true);
    else $("turn").close();
  } catch (error) {
    say(error.message, true);
  } finally {
    $("turn-set").disabled = false;
  }
}

async function doVerb(button) {
  button.disabled = true;
  $("run-said").textContent = `asking the run to ${button.dataset.verb} ...`;
  try {
    const reply = await operate(button.dataset.verb, { reason: "from the dashboard" });
    $("run-said").textContent = reply?.refused ? `refused: ${reply.refused}` : `${button.dataset.verb}: done`;
  } catch (error) {
    $("run-said").textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

async function operate(verb, body) {
  const answer = await fetch(`/api/verbs/${verb}`, { method: "POST", headers: { "Content-Type": "application/json", "X-Myxa-Token": token }, body: JSON.stringify(body) });
  return opened(answer);
}

async function opened(answer) {
  const words = await answer.text();
  let reply = null;
  try { reply = JSON.parse(words); } catch { throw new Error(words.trim() || `status ${answer.status}`); }
  if (reply.error) throw new Error(reply.error.remedy ? `${reply.error.message} -- ${reply.error.remedy}` : reply.error.message);
  return reply;
}

// -- events and samples ----------------------------------------------------------------------------------------------

function drawEvents() {
  $("event-counts").replaceChildren(...past.eventCounts.map(([kind, count]) => el("span", {}, `${kind} `, el("b", {}, String(count)))));
  const words = $("event-filter").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const rows = past.events.filter((e) => !words.length || words.some((w) => `${e.source} ${e.kind} ${e.text}`.toLowerCase().includes(w)));
  $("event-table").replaceChildren(head(["after", "source", "kind", "text"]), el("tbody", {}, ...rows.reverse().map((e) =>
    el("tr", { class: ALARMING.test(e.kind) ? "alarm" : "" }, el("td", { class: "nowrap" }, since(e.wall_s)), el("td", { class: "nowrap" }, e.source), el("td", { class: "nowrap" }, e.kind), el("td", {}, e.text)))));
}

async function loadSamples() {
  $("more-samples").disabled = true;
  try {
    const step = $("sample-step").value.trim();
    const wanted = `${step ? `&step=${encodeURIComponent(step)}` : ""}${$("sample-held-out").checked ? "&held_out=1" : ""}`;
    setGroups(await opened(await fetch(`/api/verbs/samples?num_groups=12${wanted}`)));
  } catch (error) {
    $("sample-list").replaceChildren(el("p", { class: "empty" }, error.message));
  } finally {
    $("more-samples").disabled = false;
  }
}

// -- start -----------------------------------------------------------------------------------------------------------

function choosePage() {
  const wanted = location.hash.slice(1);
  page = PAGES.includes(wanted) ? wanted : "overview";
  drawPage();
  if (page === "samples") loadSamples();
}

addEventListener("hashchange", choosePage);
$("event-filter").addEventListener("input", () => past && drawEvents());
$("more-samples").addEventListener("click", loadSamples);
for (const button of document.querySelectorAll("#token-colour button")) button.addEventListener("click", () => setColour(button.dataset.colour));
for (const button of document.querySelectorAll("#run-verbs button")) button.addEventListener("click", () => doVerb(button));
$("turn-cancel").addEventListener("click", () => $("turn").close());
$("turn-set").addEventListener("click", turn);
$("turn").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); turn(); } });
choosePage();
listen();
