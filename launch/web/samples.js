"use strict";
// The samples browser: groups with their prompts and answers by role, and what became of one prompt over the steps. Text
// is only ever text: what a model wrote may be hostile.

const ROLE = /^(system|developer|user|assistant|tool): /;
const sampled = { groups: [], onPrompt: null, limit: 30 };

function setGroups(answer) {
  sampled.groups = Array.isArray(answer) ? answer : answer?.groups ?? [];
  sampled.limit = 30;
  drawGroups();
}

function drawGroups() {
  const list = document.getElementById("sample-list"), left = sampled.groups.length - sampled.limit;
  list.replaceChildren(...sampled.groups.slice(0, sampled.limit).map(groupCard));
  if (!sampled.groups.length) list.append(el("p", { class: "empty" }, "There is no such group: no step was trained yet, or samples.jsonl did not keep any of that step."));
  if (left > 0) {
    const more = el("button", { type: "button", class: "action" }, `${left} more`);
    more.addEventListener("click", () => { sampled.limit += 60; drawGroups(); });
    list.append(more);
  }
}

function groupCard(group) {
  const facts = [el("b", {}, `group ${group.group_id}`)];
  for (const [label, value] of [["", group.outcome], ["because", group.reason], ["step", group.step >= 0 ? group.step : undefined], ["set", group.eval_set], ["by", group.source], ["versions", group.newest_version >= 0 ? `${group.oldest_version} to ${group.newest_version}` : undefined], ["label", group.label]])
    if (value !== undefined && value !== null && value !== "") facts.push(el("span", {}, `${label} ${String(value).slice(0, 200)}`.trim()));
  if (sampled.onPrompt) {
    const button = el("button", { type: "button", class: "action small" }, "this prompt over the steps");
    button.addEventListener("click", () => sampled.onPrompt(group.prompt));
    facts.push(button);
  }
  const card = el("article", { class: "card group" }, el("div", { class: "head" }, ...facts), el("div", { class: "prompt" }, ...turns(group.prompt)));
  const answers = group.answers ?? [], hidden = (group.num_answers ?? answers.length) - answers.length;
  card.append(el("div", { class: "samples" }, ...answers.map(sampleBlock)));
  if (hidden > 0) card.append(el("p", { class: "keys" }, `and ${hidden} more answers`));
  return card;
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
  facts.push(el("span", {}, `${sample.num_tokens} tokens`));
  if (sample.finish) facts.push(el("span", {}, `ended by ${sample.finish}`));
  return el("div", { class: "sample" }, el("div", { class: "head" }, ...facts), el("div", { class: "tokens" }, ...turns(sample.text ?? "")));
}

// Letters that would turn the direction of the text around, or show nothing, are spelt out.
function visible(words) {
  return words.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
