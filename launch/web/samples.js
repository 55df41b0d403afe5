"use strict";
// The samples browser: groups as conversations, a block for each rollout with its samples, and what became of one prompt
// over the steps. Text is only ever text: what a model wrote may be hostile.

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
    if (value !== undefined && value !== null && value !== "") facts.push(el("span", {}, `${label} ${visible(String(value)).slice(0, 200)}`.trim()));
  if (sampled.onPrompt) {
    const button = el("button", { type: "button", class: "action small" }, "this prompt over the steps");
    button.addEventListener("click", () => sampled.onPrompt(group.prompt));
    facts.push(button);
  }
  const card = el("article", { class: "card group" }, el("div", { class: "head" }, ...facts), el("div", { class: "prompt" }, ...offered(group.tools), ...(group.messages ?? []).map(messageBlock)));
  const answers = group.answers ?? [], hidden = (group.num_answers ?? answers.length) - answers.length;
  const rollouts = new Map();
  for (const answer of answers) rollouts.set(answer.index, [...(rollouts.get(answer.index) ?? []), answer]);
  card.append(el("div", { class: "samples" }, ...[...rollouts.values()].map(rolloutBlock)));
  if (hidden > 0) card.append(el("p", { class: "keys" }, `and ${hidden} more answers`));
  return card;
}

// The samples of one rollout: they have one reward, which is that of the last one.
function rolloutBlock(samples) {
  return el("div", { class: `rollout${samples.length > 1 ? " several" : ""}` }, ...samples.map((sample) => sampleBlock(sample, samples.length > 1)));
}

function sampleBlock(sample, isOneOfSeveral) {
  const name = isOneOfSeveral ? `${sample.index}.${sample.branch ?? 0}` : sample.index;
  const facts = [el("b", {}, `reward ${short(sample.reward)}`), el("span", {}, `sample ${name}`)];
  for (const [part, value] of Object.entries(sample.reward_parts ?? {})) facts.push(el("span", {}, `${part} ${short(value)}`));
  facts.push(el("span", {}, `${sample.num_tokens} tokens`));
  if (sample.finish) facts.push(el("span", {}, `ended by ${sample.finish}`));
  if (sample.note) facts.push(el("span", { class: "note" }, sample.note));
  return el("div", { class: "sample" }, el("div", { class: "head" }, ...facts), el("div", { class: "tokens" }, ...offered(sample.tools), ...(sample.messages ?? []).map(messageBlock)));
}

function offered(tools) {
  if (!tools?.length) return [];
  return [el("details", { class: "offered" }, el("summary", {}, `${tools.length} ${tools.length === 1 ? "tool" : "tools"} offered: ${tools.map((tool) => visible(tool.name)).join(", ")}`), ...tools.map(callBlock))];
}

const callBlock = (call) => el("div", { class: "call" }, ...(call.name ? [el("b", {}, visible(call.name)), " "] : []), visible(call.text));

function messageBlock(message) {
  const said = [];
  if (message.thought) said.push(el("details", { class: "thought", open: "" }, el("summary", {}, "thought"), visible(message.thought)));
  if (message.text || !(message.thought || message.calls?.length)) said.push(el("span", { class: "said" }, visible(message.text ?? "")));
  said.push(...(message.calls ?? []).map(callBlock));
  const facts = [...(message.facts ?? []), ...(message.is_malformed ? ["a tool call that cannot be read"] : []), ...(message.call_id ? [`answers ${visible(message.call_id)}`] : [])];
  if (facts.length) said.push(el("span", { class: "facts" }, facts.join(" \u00b7 ")));
  const role = [message.role, message.name].filter(Boolean).map(visible).join(" ");
  const kind = /^(system|developer|user|assistant|tool)$/.test(message.role) ? message.role : "";
  return el("div", { class: `turn${message.is_learnt ? " learnt" : ""}` }, ...(role ? [el("span", { class: `role ${kind}` }, role)] : []), el("div", { class: "body" }, ...said));
}

// Letters that would turn the direction of the text around, or show nothing, are spelt out.
function visible(words) {
  return String(words).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
