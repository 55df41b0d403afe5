// The samples browser: groups with their prompts, and every token coloured by what is asked for. Text is only ever text:
// what a model wrote may be hostile.
import { el, short } from "./plots.js";

const HEAT = [0.1, 0.5, 1.5, 3, 6];
const HEAT_WORDS = ["< 0.1", "0.1", "0.5", "1.5", "3", "6 nats"];
let groups = [];
let colour = "logprob";

export function setGroups(answer) {
  groups = Array.isArray(answer) ? answer : answer?.groups ?? [];
  const hasGap = groups.some((g) => g.samples?.some((s) => s.train_logprobs?.length));
  document.querySelector('[data-colour="gap"]').hidden = !hasGap;
  draw();
}

export function setColour(name) {
  colour = name;
  for (const button of document.querySelectorAll("#token-colour button")) button.setAttribute("aria-pressed", String(button.dataset.colour === name));
  draw();
}

function draw() {
  const list = document.getElementById("sample-list");
  list.replaceChildren(...groups.map(groupCard));
  if (!groups.length) list.append(el("p", { class: "empty" }, "There is no such group: none has been finished yet, or samples.jsonl did not keep any of that step."));
  document.getElementById("token-key").replaceChildren(...key());
}

function key() {
  if (colour === "logprob" || colour === "gap") {
    const what = colour === "gap" ? "|trainer - engine|, " : "how unlikely the token was, ";
    return [what, ...HEAT_WORDS.map((word, i) => el("span", { class: i ? `swatch h${i}` : "swatch" }, word))];
  }
  if (colour !== "version") return [];
  const versions = [...new Set(groups.flatMap((g) => (g.samples ?? []).flatMap((s) => s.versions ?? [])))].filter((v) => v >= 0).sort((a, b) => a - b);
  return versions.slice(-12).map((v) => el("span", { class: `swatch v${v % 6}` }, `v${v}`));
}

function groupCard(group) {
  const facts = [el("b", {}, `group ${group.group_id}`)];
  for (const [label, value] of [["", group.outcome], ["because", group.reason], ["now", group.state?.toLowerCase()], ["step", group.step >= 0 ? group.step : undefined], ["set", group.eval_set], ["by", group.rollout ?? group.source], ["label", group.label], ["change", group.knobs || undefined]])
    if (value !== undefined && value !== null && value !== "") facts.push(el("span", {}, `${label} ${String(value).slice(0, 200)}`.trim()));
  const card = el("article", { class: "card group" }, el("div", { class: "head" }, ...facts), el("div", { class: "prompt" }, visible(promptText(group.prompt))));
  card.append(el("div", { class: "samples" }, ...(group.samples ?? group.answers ?? []).map(sampleBlock)));
  return card;
}

function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  const messages = Array.isArray(prompt) ? prompt : prompt?.messages ?? [];
  return messages.map((m) => `${m.role}: ${m.content}`).join("\n");
}

function sampleBlock(sample) {
  const facts = [el("b", {}, `reward ${short(sample.reward)}`), el("span", {}, `sample ${sample.index}`)];
  for (const [name, value] of Object.entries(sample.reward_parts ?? {})) facts.push(el("span", {}, `${name} ${short(value)}`));
  const versions = (sample.versions ?? []).filter((v) => v >= 0);
  if (versions.length) facts.push(el("span", {}, span("v", Math.min(...versions), Math.max(...versions))));
  const num = (sample.tokens ?? []).length, total = sample.num_tokens ?? num;
  facts.push(el("span", {}, total > num ? `${num} of ${total} tokens` : `${num} tokens`));
  if (sample.temperature) facts.push(el("span", {}, `temperature ${short(sample.temperature)}`));
  if (sample.finish) facts.push(el("span", {}, `ended by ${sample.finish}`));
  const words = el("p", { class: "tokens" });
  if (sample.tokens?.length) words.append(...sample.tokens.map((token, i) => tokenSpan(sample, token, i)));
  else words.append(visible(sample.text ?? ""));
  return el("div", { class: "sample" }, el("div", { class: "head" }, ...facts), words);
}

const span = (letter, low, high) => (low === high ? `${letter}${low}` : `${letter}${low}..${letter}${high}`);

function tokenSpan(sample, token, i) {
  const logprob = sample.logprobs?.[i], version = sample.versions?.[i], trained = sample.train_logprobs?.[i];
  const isMasked = sample.loss_mask && !sample.loss_mask[i];
  const words = [`token ${i}`, isMasked ? "not trained" : `log-prob ${short(logprob)}`];
  if (trained !== undefined) words.push(`trainer ${short(trained)}, gap ${short(trained - logprob)}`);
  if (version >= 0) words.push(`version ${version}`);
  return el("span", { class: `tok${isMasked ? " masked" : ""} ${tint(logprob, trained, version, isMasked)}`, title: words.join("\n") }, shown(token));
}

function shown(token) {
  return visible(String(token).replace(/\n/g, "\u21b5\n"));
}

// Letters that would turn the direction of the text around, or show nothing, are spelt out.
function visible(words) {
  return words.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function tint(logprob, trained, version, isMasked) {
  if (isMasked || colour === "plain") return "";
  if (colour === "version") return version >= 0 ? `v${version % 6}` : "";
  const value = colour === "gap" ? Math.abs((trained ?? logprob) - logprob) : -(logprob ?? 0);
  const level = HEAT.filter((limit) => value >= limit).length;
  return level ? `h${level}` : "";
}
