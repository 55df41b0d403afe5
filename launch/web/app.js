"use strict";
// The page of a run. The dashboard feeds it while the run works; a report carries its data. Everything that comes from a
// run is put in as text (textContent, setAttribute), never as markup.

const $ = (id) => document.getElementById(id);
const PAGES = ["overview", "learning", "speed", "metrics", "samples", "time", "knobs", "events", "config"];
const DRAWN = new Set(["overview", "learning", "speed", "metrics"]);
const kept = $("data") ? JSON.parse($("data").textContent) : null; // of a report
let state = null, past = null, others = [], page = "overview", turning = null, drawn = {};
let indexes = [];

const token = kept ? "" : takeToken();

function takeToken() {
  const url = new URL(location.href);
  const given = url.searchParams.get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", url.pathname + url.hash); // the secret stays out of the address bar and its history
  }
  return given ?? sessionStorage.getItem("token") ?? "";
}

// -- where the data come from ----------------------------------------------------------------------------------------

async function listen() {
  for (let seen = ""; ; await new Promise((resolve) => setTimeout(resolve, 1000))) {
    try {
      const answer = await fetch(`/api/state?seen=${seen}`);
      if (!answer.ok) {
        setLink("off", answer.status === 401 ? "the secret is not known: open the printed URL" : "the run does not answer");
        continue;
      }
      const told = await answer.json();
      ({ state, generation: seen } = told);
      state.mayOperate = told.mayOperate && !state.hasEnded;
      if (told.history) setPast(told.history);
      setLink(state.hasEnded ? "over" : "on", state.hasEnded ? "the run has ended" : "live");
      if (told.history) drawPage();
      else drawState();
    } catch {
      setLink("off", "no answer: of a run that is over, see report.html");
    }
  }
}

function setPast(value) {
  past = value;
  drawn = {};
  indexes = [past, ...others].map(indexed);
}

function showKept() {
  ({ state, others } = kept);
  setPast(kept.history);
  document.body.classList.add("kept");
  document.body.classList.toggle("compared", others.length > 0);
  $("brand").textContent = others.length ? "myxa compare" : "myxa report";
  $("link").hidden = true;
  setGroups(kept.samples);
  $("learning").before($("controls"));
  drawPage();
}

function setLink(css, words) {
  $("link").className = `link ${css}`;
  $("link").textContent = words;
}

const isShown = (name) => (kept ? !others.length || DRAWN.has(name) : name === page);

// -- the head, on every page -----------------------------------------------------------------------------------------

function drawState() {
  const isMany = others.length > 0 && kept;
  document.title = `${state.name || "run"} - myxa`;
  $("name").textContent = isMany ? [past, ...others].map((run) => run.name).join(" and ") : state.name || "a run";
  $("phase").textContent = state.phase;
  $("phase").className = `badge ${state.badge}`;
  $("phase").hidden = $("tiles").hidden = isMany;
  $("origin").textContent = state.origin;
  $("origin").hidden = !state.origin || isMany;
  $("notice").textContent = state.notice;
  $("notice").hidden = !state.notice || isMany;
  $("notice").classList.toggle("bad", state.phase === "failed");
  $("why").textContent = state.why || "nothing is known yet";
  $("remedy").textContent = state.remedy ? `To try: ${state.remedy}.` : "";
  $("notes").replaceChildren(...state.notes.map((note) => el("li", {}, el("b", {}, "missing"), ` ${note}.`)));
  $("tiles").replaceChildren(...state.facts.map(([label, words]) => {
    const [figure, ...notes] = words.split("   "), note = notes.join(" \u00b7 ");
    return el("div", { class: "tile" }, el("span", { class: "label" }, label), el("span", { class: "figure" }, figure), el("span", { class: "note", title: note }, note));
  }));
  for (const kinds of document.querySelectorAll(".kinds")) if (!kinds.children.length) kinds.append(...kindKeys());
  if (isShown("overview")) drawOverview();
  if (isShown("knobs")) drawKnobs();
}

const PAINTERS = {
  overview: () => { if (!kept) boxes.overview.show(OVERVIEW.map((title) => CHARTS.find((c) => c.title === title)), ""); drawDrops(); },
  learning: () => { boxes.learning.show(chosen("learning"), "No training step was reported yet."); $("legend").replaceChildren(...changeLegend()); },
  speed: () => boxes.speed.show(chosen("speed"), "No throughput was reported yet."),
  metrics: drawMetrics,
  samples: () => {},
  time: drawTime,
  knobs: drawChanges,
  events: drawEvents,
  config: drawConfig,
};
const boxes = Object.fromEntries([...DRAWN].map((name) => [name, new ChartBox($(`charts-${name}`), () => indexes)]));
const chosen = (name) => CHARTS.filter((c) => c.page === name && (!kept || !others.length || COMPARED.includes(c.title)));

function drawPage() {
  for (const name of PAGES) {
    const isHere = isShown(name) && !(kept && others.length && name === "overview");
    $(name).hidden = !isHere;
    const link = $("nav").querySelector(`[href="#${name}"]`);
    link.toggleAttribute("aria-current", !kept && name === page);
    link.hidden = Boolean(kept) && (!isHere || (name === "samples" && !kept.samples.length));
  }
  if (kept && !kept.samples.length) $("samples").hidden = true;
  $("controls").hidden = !kept && !DRAWN.has(page);
  if (state) drawState();
  if (!past) return;
  for (const name of PAGES) if (!$(name).hidden) PAINTERS[name]();
}

function redrawCharts() {
  for (const [name, box] of Object.entries(boxes)) if (!$(name).hidden) box.redraw();
}

function drawMetrics() {
  const words = $("metric-filter").value, specs = specsOfAll(indexes, words);
  const total = words ? specsOfAll(indexes, "").length : specs.length;
  $("metric-count").textContent = words ? `${specs.length} of ${total}` : `${total} metrics`;
  boxes.metrics.show(specs, words ? "No metric has such a name." : "No metric was reported yet.");
}

function changeLegend() {
  const done = past.changes.filter((c) => c.isDone).slice(-8);
  if (!done.length || others.length) return [];
  const items = done.map((c) => el("li", { value: c.number }, `${c.what}${c.who ? ` by ${c.who}` : ""}${c.reason ? ` (${c.reason})` : ""}`));
  return [el("details", { class: "card", open: "" }, el("summary", {}, "Vertical lines: changes made while running"), el("ol", {}, ...items))];
}

// -- runs side by side -----------------------------------------------------------------------------------------------

async function listRuns() {
  if (!$("runs").open) return;
  const runs = await opened(await fetch("/api/runs"));
  $("run-list").replaceChildren(...runs.filter((run) => run.name !== past?.name).map((run) => {
    const box = el("input", { type: "checkbox" });
    box.checked = others.some((other) => other.name === run.name);
    box.addEventListener("change", () => compareWith(run.name, box));
    return el("label", {}, box, ` ${run.name} `, el("span", { class: "keys" }, `${run.state}, step ${run.step}, reward ${short(run.reward)}`));
  }));
  if (!$("run-list").children.length) $("run-list").append(el("p", { class: "empty" }, "There is no other run in this folder."));
}

async function compareWith(name, box) {
  others = others.filter((other) => other.name !== name);
  if (box.checked) others.push(await opened(await fetch(`/api/run?name=${encodeURIComponent(name)}`)));
  setPast(past);
  drawPage();
}

// -- overview --------------------------------------------------------------------------------------------------------

function drawOverview() {
  const rows = [];
  let node = null;
  for (const actor of state.actors) {
    if (actor.node !== node && (actor.host || actor.node)) rows.push(el("p", { class: "nodename" }, `node ${actor.node}  ${actor.host}`));
    node = actor.node;
    rows.push(actorRow(actor));
  }
  $("actors").replaceChildren(...(rows.length ? rows : [el("p", { class: "empty" }, "No actor is known.")]));
  $("queue-card").hidden = !state.queues.length;
  $("engine-card").hidden = !state.engines.rows.length;
  $("done").textContent = dotted(state.done);
  $("queues").replaceChildren(...state.queues.map((q) => countRow(q.label, q.count, q.total, q.label === "slots" ? `${q.count} of ${q.total}` : String(q.count))));
  $("lagtext").textContent = state.lags.length ? `versions between a group and its step; newest: ${dotted(state.lagText)}` : "no lag was reported yet";
  const lags = lagsShown(), most = Math.max(1, ...lags.map((b) => b.count));
  const edge = lags.findLastIndex((b) => b.isAllowed);
  $("lags").replaceChildren(...lags.map((b, i) => countRow(`lag ${b.lag}`, b.count, most, short(b.count), `${b.isAllowed ? "" : "over"}${i === edge ? " edge" : ""}`)));
  $("engines").replaceChildren(table(state.engines.columns, state.engines.rows));
  $("rollout-card").hidden = !state.rolloutTime.length;
  $("rollout-time").textContent = `their time: ${state.rolloutTime.join(" \u00b7 ")}`;
  $("rollouts").replaceChildren(...state.underWay.map((words) => el("li", {}, words)));
}

// Groups by lag over the run, or of the step that was asked for; of a long run, where points are several steps, their mean.
function lagsShown() {
  const words = $("lag-step").value.trim(), step = Number(words);
  if (!words || !past) return state.lags;
  const bound = past.bound.findLast(([at]) => at <= step)?.[1];
  return state.lags.map(({ lag, isAllowed }) => {
    const series = indexes[0].metrics.get(`lag_hist/${lag}`)?.[0], i = series ? series.steps.findIndex((at) => at >= step) : -1;
    return { lag, count: i >= 0 && (series.steps[i] === step || series.low) ? series.mean[i] : 0, isAllowed: bound === undefined ? isAllowed : lag <= bound };
  });
}

function drawDrops() {
  const all = [...past.drops, ...past.failures.map(([kind, count]) => [`failed: ${kind}`, count])];
  $("drop-card").hidden = !all.length;
  const most = Math.max(1, ...all.map(([, count]) => count));
  $("drops").replaceChildren(...all.map(([reason, count]) => countRow(reason, count, most, short(count))));
}

const dotted = (words) => words.replace(/ {3}/g, " \u00b7 ");

function kindKeys() {
  return (state?.kinds ?? []).map((kind) => el("span", { class: `key k-${kind}` }, kind));
}

function shareBar(shares) {
  return el("div", { class: "bar" }, ...shares.map((share, i) => wide(el("span", { class: `k-${state.kinds[i]}`, title: state.kinds[i] }), share)));
}

function actorRow(actor) {
  const parts = actor.parts.map((part) => part.split(" (")[0]).join(" \u00b7 ");
  const words = actor.isWell ? parts || "its time is not reported yet" : actor.state;
  const gpus = actor.devices.length ? ` \u00b7 GPU ${actor.devices.join(", ")}` : "";
  return el("div", { class: `actor${actor.isWell ? "" : " ill"}`, title: `pid ${actor.pid}, ${actor.state}\n${actor.parts.join("\n")}` },
    el("span", { class: "who" }, actor.name), shareBar(actor.shares), el("span", { class: "barnote" }, words + gpus));
}

function wide(node, share) {
  node.style.width = `${share * 100}%`;
  return node;
}

function countRow(label, count, total, words, css = "") {
  return el("div", { class: `row ${css}` }, el("span", { title: label }, label), el("div", { class: "bar" }, wide(el("span"), total > 0 ? Math.min(1, count / total) : 0)), el("span", { class: "num" }, words));
}

const head = (columns) => el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col" }, c))));
const body = (rows) => el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, String(cell))))));
const fillTable = (node, columns, rows, empty) => node.replaceChildren(...(rows.length ? [head(columns), el("tbody", {}, ...rows)] : [el("caption", {}, empty)]));
const table = (columns, rows) => el("table", { class: "plain" }, head(columns), body(rows));

// -- time ------------------------------------------------------------------------------------------------------------

function drawTime() {
  if (drawn.time || !state) return;
  drawn.time = true;
  const lanes = past.lanes.filter((lane) => lane.bins.length);
  if (!lanes.length) return $("lanes").replaceChildren(el("p", { class: "empty" }, "No actor reported its time yet."));
  drawLanes($("lanes"), lanes, state.kinds, Math.max(0, Math.min(...lanes.map((l) => l.bins[0][0]))), Math.max(...lanes.map((l) => l.bins.at(-1)[1])));
  $("totals").replaceChildren(...lanes.map((lane) => el("div", { class: "actor" }, el("span", { class: "who" }, lane.actor), shareBar(lane.total), el("span", { class: "barnote" }, lane.parts.join(" \u00b7 ")))));
}

// -- knobs -----------------------------------------------------------------------------------------------------------

function drawKnobs() {
  $("knob-part").hidden = Boolean(kept) && !state.knobs.length;
  const note = state.mayOperate ? "A change is made by all owners at one boundary, or nowhere." : "This dashboard only shows; myxa set, myxa top or myxa dashboard --operate turn knobs.";
  $("knob-note").textContent = state.hasEnded ? "The run has ended: this is how its knobs were last seen." : note;
  $("run-verbs").hidden = !state.mayOperate;
  const columns = ["knob", "value", "run file", "takes", "at next", "owner", "what it does", ...(state.mayOperate ? [""] : [])];
  const key = JSON.stringify([state.knobs, state.mayOperate]);
  if (drawn.knobs === key) return;
  drawn.knobs = key;
  fillTable($("knob-table"), columns, state.knobs.map(knobRow), "No knob is known.");
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

function drawChanges() {
  const isWell = (c) => ["done", "nothing to do"].includes(c.result);
  const rows = [...past.changes].reverse().map((c) => el("tr", { class: isWell(c) ? "" : "alarm" },
    el("td", { class: "number" }, String(c.number)), el("td", { class: "nowrap" }, since(c.after)), el("td", { class: "nowrap" }, c.step >= 0 ? String(c.step) : ""),
    el("td", {}, c.what), el("td", {}, c.who), el("td", {}, c.reason), el("td", {}, c.detail && !isWell(c) ? `${c.result}: ${c.detail}` : c.result)));
  fillTable($("change-table"), ["no.", "after", "step", "what", "who", "reason", "result"], rows, "Nothing was changed.");
}

const since = (seconds) => duration(Math.max(0, seconds));

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

// -- events, configuration, samples ----------------------------------------------------------------------------------

function drawEvents() {
  $("event-counts").replaceChildren(...past.eventCounts.map(([kind, count]) => el("span", {}, `${kind} `, el("b", {}, String(count)))));
  const words = $("event-filter").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const rows = past.events.filter((e) => !words.length || words.some((w) => `${e.source} ${e.kind} ${e.text}`.toLowerCase().includes(w)));
  fillTable($("event-table"), ["after", "source", "kind", "text"], rows.reverse().map((e) =>
    el("tr", { class: e.isAlarming ? "alarm" : "" }, el("td", { class: "nowrap" }, since(e.after)), el("td", { class: "nowrap" }, e.source), el("td", { class: "nowrap" }, e.kind), el("td", {}, e.text))), past.events.length ? "No event has these words." : "No event was reported.");
  const left = past.numEvents - past.events.length;
  $("event-left").textContent = left > 0 ? `${left} more of these kinds are in events.jsonl` : "";
}

function drawConfig() {
  $("config-text").textContent = past.configText || "The run file is missing.";
}

async function loadSamples() {
  const step = $("sample-step").value.trim(), set = $("sample-set").value, words = $("sample-search").value.trim();
  $("prompt-past").replaceChildren();
  if (kept) {
    const fits = (g) => (step === "" || String(g.step) === step) && (set === "all" || Boolean(g.is_held_out) === (set === "held-out"))
      && (!words || JSON.stringify([g.prompt, g.label, (g.answers ?? []).map((a) => a.messages?.map((m) => m.text))]).toLowerCase().includes(words.toLowerCase()));
    return setGroups(kept.samples.filter(fits));
  }
  $("more-samples").disabled = true;
  try {
    const query = new URLSearchParams({ num_groups: words || set === "all" ? "64" : "12", step, held_out: set, search: words });
    setGroups(await opened(await fetch(`/api/samples?${query}`)));
  } catch (error) {
    $("sample-list").replaceChildren(el("p", { class: "empty" }, error.message));
  } finally {
    $("more-samples").disabled = false;
  }
}

// What became of one prompt: the mean reward of its groups over the steps, and the groups.
async function showPrompt(prompt) {
  const groups = kept ? kept.samples.filter((g) => g.prompt === prompt)
    : (await opened(await fetch(`/api/samples?${new URLSearchParams({ num_groups: "200", prompt: [...String(prompt)].slice(0, 300).join("") })}`))).groups;
  const sorted = [...groups].sort((a, b) => a.step - b.step);
  const mean = (g) => g.answers.reduce((sum, a) => sum + a.reward, 0) / Math.max(1, g.answers.length);
  const line = { source: "", steps: sorted.map((g) => g.step), walls: sorted.map((g) => g.wall_s - (past?.startWall ?? 0)), mean: sorted.map(mean) };
  const run = { name: "", changes: [], bound: [], metrics: new Map([["reward", [line]]]) };
  const chart = new Chart({ title: `Mean reward of this prompt's ${groups.length} ${groups.length === 1 ? "group" : "groups"}`, lines: [["reward", "reward"]] }, () => [run]);
  const back = el("button", { type: "button", class: "action" }, "back to all");
  back.addEventListener("click", loadSamples);
  $("prompt-past").replaceChildren(chart.node, back);
  chart.isSeen = true;
  setGroups(sorted.reverse());
  chart.draw();
  $("samples").scrollIntoView();
}

// -- start -----------------------------------------------------------------------------------------------------------

function choosePage() {
  if (kept) return;
  const wanted = location.hash.slice(1);
  page = PAGES.includes(wanted) ? wanted : "overview";
  drawPage();
  if (page === "samples") loadSamples();
}

sampled.onPrompt = showPrompt;
addEventListener("hashchange", choosePage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn = {}; drawPage(); });
$("event-filter").addEventListener("input", () => past && drawEvents());
$("lag-step").addEventListener("input", () => state && drawOverview());
$("metric-filter").addEventListener("input", () => past && drawMetrics());
$("smooth").addEventListener("input", () => { settings.smooth = Number($("smooth").value); redrawCharts(); });
$("axis").addEventListener("change", () => { settings.axis = $("axis").value; redrawCharts(); });
$("log").addEventListener("change", () => { settings.isLog = $("log").checked; redrawCharts(); });
$("runs").addEventListener("toggle", listRuns);
$("more-samples").addEventListener("click", loadSamples);
$("sample-search").addEventListener("keydown", (event) => { if (event.key === "Enter") loadSamples(); });
for (const button of document.querySelectorAll("#run-verbs button")) button.addEventListener("click", () => doVerb(button));
$("turn-cancel").addEventListener("click", () => $("turn").close());
$("turn-set").addEventListener("click", turn);
$("turn").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); turn(); } });
if (kept) {
  showKept();
  if (kept.samples.length) loadSamples();
} else {
  $("runs").hidden = false;
  choosePage();
  listen();
}
