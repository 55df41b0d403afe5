"use strict";
// The samples browser: groups with their prompts by role, every token coloured by what is asked for, and what became of
// one prompt over the steps. Text is only ever text: what a model wrote may be hostile.

const HEAT = [0.1, 0.5, 1.5, 3, 6];
const HEAT_WORDS = ["< 0.1", "0.1", "0.5", "1.5", "3", "6 nats"];
const ROLE = /^(system|developer|user|assistant|tool): /;
const sampled = { groups: [], colour: "logprob", onPrompt: null, limit: 30 };

function setGroups(answer) {
  sampled.groups = Array.isArray(answer) ? answer : answer?.groups ?? [];
  sampled.limit = 30;
  const all = sampled.groups.flatMap((g) => g.samples ?? []);
  document.getElementById("token-colour").hidden = !all.some((s) => s.tokens?.length);
  drawGroups();
}

function setColour(name) {
  sampled.colour = name;
  for (const button of document.querySelectorAll("#token-colour button")) button.setAttribute("aria-pressed", String(button.dataset.colour === name));
  drawGroups();
}

function drawGroups() {
  const list = document.getElementById("sample-list"), left = sampled.groups.length - sampled.limit;
  list.replaceChildren(...sampled.groups.slice(0, sampled.limit).map(groupCard));
  if (!sampled.groups.length) list.append(el("p", { class: "empty" }, "There is no such group: none has been finished yet, or samples.jsonl did not keep any of that step."));
  if (left > 0) {
    const more = el("button", { type: "button", class: "action" }, `${left} more`);
    more.addEventListener("click", () => { sampled.limit += 60; drawGroups(); });
    list.append(more);
  }
  document.getElementById("token-key").replaceChildren(...(document.getElementById("token-colour").hidden ? [] : tokenKey()));
}

function tokenKey() {
  if (sampled.colour === "logprob") {
    return ["how unlikely the token was, ", ...HEAT_WORDS.map((word, i) => el("span", { class: i ? `swatch h${i}` : "swatch" }, word))];
  }
  if (sampled.colour !== "version") return [];
  const versions = [...new Set(sampled.groups.flatMap((g) => (g.samples ?? []).flatMap((s) => s.versions ?? [])))].filter((v) => v >= 0).sort((a, b) => a - b);
  return versions.slice(-12).map((v) => el("span", { class: `swatch v${v % 6}` }, `v${v}`));
}

function groupCard(group) {
  const facts = [el("b", {}, `group ${group.group_id}`)];
  for (const [label, value] of [["", group.outcome], ["because", group.reason], ["now", group.state?.toLowerCase()], ["step", group.step >= 0 ? group.step : undefined], ["set", group.eval_set], ["by", group.rollout ?? group.source], ["label", group.label], ["change", group.knobs || undefined]])
    if (value !== undefined && value !== null && value !== "") facts.push(el("span", {}, `${label} ${String(value).slice(0, 200)}`.trim()));
  if (sampled.onPrompt) {
    const button = el("button", { type: "button", class: "action small" }, "this prompt over the steps");
    button.addEventListener("click", () => sampled.onPrompt(group.prompt));
    facts.push(button);
  }
  const card = el("article", { class: "card group" }, el("div", { class: "head" }, ...facts), el("div", { class: "prompt" }, ...turns(promptText(group.prompt))));
  const answers = group.samples ?? group.answers ?? [], hidden = (group.num_answers ?? answers.length) - answers.length;
  card.append(el("div", { class: "samples" }, ...answers.map(sampleBlock)));
  if (hidden > 0) card.append(el("p", { class: "keys" }, `and ${hidden} more answers`));
  return card;
}

function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  const messages = Array.isArray(prompt) ? prompt : prompt?.messages ?? [];
  return messages.map((m) => `${m.role}: ${m.content}`).join("\n");
}

// A text in which lines begin with "user: " and the like, as one block a turn.
function turns(text) {
  const found = [];
  for (const line of String(text).split("\n")) {
    const role = line.match(ROLE)?.[1];
    if (role || !found.length) found.push({ role: role ?? "", lines: [role ? line.slice(role.length + 2) : line] });
    else found.at(-1).lines.push(line);
  }
  return found.map((turn) => el("div", { class: "turn" }, ...(turn.role ? [el("span", { class: `role ${turn.role}` }, turn.role)] : []), el("span", { class: "said" }, visible(turn.lines.join("\n")))));
}

function sampleBlock(sample) {
  const facts = [el("b", {}, `reward ${short(sample.reward)}`), el("span", {}, `sample ${sample.index}`)];
  for (const [name, value] of Object.entries(sample.reward_parts ?? {})) facts.push(el("span", {}, `${name} ${short(value)}`));
  const versions = (sample.versions ?? []).filter((v) => v >= 0);
  if (versions.length) facts.push(el("span", {}, spanText("v", Math.min(...versions), Math.max(...versions))));
  const num = (sample.tokens ?? []).length, total = sample.num_tokens ?? num;
  facts.push(el("span", {}, num && total > num ? `${num} of ${total} tokens` : `${total} tokens`));
  if (sample.temperature) facts.push(el("span", {}, `temperature ${short(sample.temperature)}`));
  if (sample.finish) facts.push(el("span", {}, `ended by ${sample.finish}`));
  const words = el("div", { class: "tokens" });
  if (sample.tokens?.length) words.append(...sample.tokens.map((token, i) => tokenSpan(sample, token, i)));
  else words.append(...turns(sample.text ?? ""));
  return el("div", { class: "sample" }, el("div", { class: "head" }, ...facts), words);
}

const spanText = (letter, low, high) => (low === high ? `${letter}${low}` : `${letter}${low}..${letter}${high}`);

function tokenSpan(sample, token, i) {
  const logprob = sample.logprobs?.[i], version = sample.versions?.[i];
  const isMasked = sample.loss_mask && !sample.loss_mask[i];
  const words = [`token ${i}`, isMasked ? "not trained" : `log-prob ${short(logprob)}`];
  if (version >= 0) words.push(`version ${version}`);
  return el("span", { class: `tok${isMasked ? " masked" : ""} ${tint(logprob, version, isMasked)}`, title: words.join("\n") }, visible(String(token).replace(/\n/g, "\u21b5\n")));
}

// Letters that would turn the direction of the text around, or show nothing, are spelt out.
function visible(words) {
  return words.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function tint(logprob, version, isMasked) {
  if (isMasked || sampled.colour === "plain") return "";
  if (sampled.colour === "version") return version >= 0 ? `v${version % 6}` : "";
  const level = HEAT.filter((limit) => -(logprob ?? 0) >= limit).length;
  return level ? `h${level}` : "";
}
