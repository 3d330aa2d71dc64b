// The playground: a chat, and beside it the tree of every round. Talks to this server only.

import { markdown } from "./markdown.js";
import { asList, caption, drawTree, element } from "./tree.js";

const at = (id) => document.getElementById(id);
const PLAY_MS = 800; // a round, when they are played
const REFRESH_MS = 120; // drawing takes time from the engine, where both are on one machine
const WORDS = {
  prefill: "reading the prompt",
  draft: "guessing",
  tree_build: "growing the tree",
  tree_compile: "laying it out",
  verify: "checking",
  commit: "keeping what was accepted",
  device_round: "rounds on the device",
};

let engine = null;
let messages = []; // of the chat so far
let rounds = []; // of the answer whose rounds are shown, each with the place of its text in `steps`
let shown = null; // the box of that answer
let following = true; // whether the latest round is shown while the text grows
let playing = null; // the timer that steps through the rounds
let running = null; // AbortController of the answer in progress

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function complain(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

async function refusal(response) {
  if (response.status === 401) {
    at("key-field").hidden = false;
    at("key").focus();
    return "This server asks for an API key: give it below the message and send again.";
  }
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${response.status}.`;
}

// Events of a stream, until its end. Throws an Error with the server's words.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    waiting += value;
    const whole = waiting.split("\n\n");
    waiting = whole.pop();
    for (const part of whole) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// ---- engine and settings

async function loadEngine() {
  const response = await fetch("/playground/engine", { headers: headers() });
  if (!response.ok) throw new Error(await refusal(response));
  engine = await response.json();
  at("engine").textContent = `${engine.model} · ${engine.backend} · ${engine.max_seq_len} tokens`
    + (engine.chat ? "" : " · no chat template: a message is continued as text");
  at("method").replaceChildren(...engine.methods.map(({ name }) => element("option", { value: name }, title(name))));
  const budgets = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].filter((b) => b <= engine.max_tree_budget);
  at("budget").replaceChildren(...["auto", ...budgets].map((b) => element("option", { value: b }, String(b))));
  at("tokens").max = engine.max_seq_len;
  at("knows").textContent = engine.knows ? `This model knows only ${engine.knows}. Try one:` : "Try one:";
  at("examples").hidden = !engine.examples.length;
  at("examples").querySelector("ul").replaceChildren(...engine.examples.map((prompt) => {
    const button = element("button", { type: "button" }, prompt);
    button.addEventListener("click", () => {
      at("message").value = prompt;
      send();
    });
    return element("li", {}, button);
  }));
}

const drafts = (method) => engine.methods.find(({ name }) => name === method).drafts;
const title = (method) => `${method}: ${drafts(method) ? "guesses ahead" : "one token at a time"}`;

function settings(method, compared) {
  const budget = at("budget").value;
  return {
    method,
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    max_tokens: Number(at("tokens").value),
    skip_reading_prefix_cache: compared, // the second run would find the prompt that the first one read
    ...(drafts(method) ? { tree_budget: budget === "auto" ? "auto" : Number(budget) } : {}),
  };
}

// ---- answers

function answerBox(turn, method) {
  const text = element("div", { class: "text" });
  const figures = element("p", { class: "figures" });
  const times = element("details", { class: "times", hidden: "" }, element("summary", {}, "Where the time went"));
  turn.append(element("div", { class: "answer", "data-method": method },
    element("h3", {}, title(method)), text, figures, times));
  return { text, figures, times, output: "", steps: [], last: null, busy: null, timer: null, done: false };
}

// The nodes of output[from, to): an element for each part, coloured in turn.
function pieces(box, from, to) {
  const made = [];
  box.steps.forEach((step, index) => {
    const [begin, end] = [Math.max(from, step.from), Math.min(to, step.to)];
    if (begin >= end) return;
    const marks = `step ${index % 2 ? "odd" : "even"}${box === shown && rounds[at("round").value - 1]?.step === index ? " shown" : ""}`;
    made.push(element("span", { class: marks, "data-step": index }, box.output.slice(begin, end)));
  });
  return made;
}

function refresh(box) {
  clearTimeout(box.timer);
  box.timer = null;
  atBottom(() => {
    const parts = (from, to) => pieces(box, from, to);
    box.text.replaceChildren(...(at("formatted").checked
      ? markdown(box.output, parts)
      : [element("p", {}, ...parts(0, box.output.length))]));
    showFigures(box);
    if (box === shown && following && rounds.length) showRound(rounds.length);
  });
}

// Changes the conversation, and stays at its end where that was in view.
function atBottom(change) {
  const turns = at("turns");
  const was = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  change();
  if (was) turns.scrollTop = turns.scrollHeight;
}

function showFigures(box) {
  const figures = box.last;
  const speed = figures.decode_tokens_per_s;
  box.figures.textContent = `${figures.output_tokens} tokens in ${figures.rounds} rounds, `
    + `${figures.mean_acceptance_length.toFixed(2)} tokens a round`
    + (speed ? `, ${speed.toFixed(1)} tokens/s` : "");
}

function showTimes(box) {
  const rows = Object.entries(WORDS).filter(([stage]) => box.last.stage_s[stage] > 0).map(([stage, words]) =>
    element("tr", {}, element("th", { scope: "row" }, words),
      element("td", {}, `${(1000 * box.last.stage_s[stage]).toFixed(1)} ms`)));
  box.times.append(element("table", {}, element("tbody", {}, ...rows)));
  box.times.hidden = false;
}

async function answer(turn, method, follow, compared) {
  const response = await fetch("/playground/rounds", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({ messages, ...settings(method, compared) }),
  });
  if (!response.ok) throw new Error(await refusal(response));
  const box = answerBox(turn, method);
  if (follow) clearRounds(box);
  try {
    for await (const event of events(response)) {
      box.steps.push({ from: box.output.length, to: box.output.length + event.text.length });
      box.output += event.text;
      if (follow) takeRounds(event, box);
      box.last = event.figures;
      box.busy = event.busy;
      box.timer ??= setTimeout(refresh, REFRESH_MS, box);
    }
  } finally {
    if (box.last) refresh(box);
  }
  showTimes(box);
  box.done = true;
  if (follow && following && rounds.length) showRound(bestRound());
  return box;
}

async function send() {
  const said = at("message").value;
  if (!said.trim() || running) return;
  complain("");
  running = new AbortController();
  setRunning(true);
  const answers = element("div", { class: "answers", "aria-busy": "true" });
  const turn = element("article", { class: "turn" }, element("p", { class: "said" }, said), answers);
  try {
    if (!engine) await loadEngine();
    messages.push({ role: "user", content: said });
    at("start").hidden = true;
    at("turns").hidden = false;
    at("turns").append(turn);
    at("turns").scrollTop = at("turns").scrollHeight;
    at("message").value = "";
    const method = at("method").value;
    const plain = engine.methods.find((m) => !m.drafts).name;
    const compared = at("beside").checked && method !== plain;
    const box = await answer(answers, method, true, compared);
    if (compared) compare(turn, box, plain, await answer(answers, plain, false, true));
    messages.push({ role: "assistant", content: box.output });
  } catch (error) {
    if (messages.at(-1)?.role === "user") messages.pop(); // the next message does not build on half an answer
    if (!at("message").value) at("message").value = said;
    complain(error.name === "AbortError" ? "Stopped." : error.message);
  }
  answers.removeAttribute("aria-busy");
  running = null;
  setRunning(false);
}

function compare(turn, box, plain, other) {
  const faster = box.last.decode_tokens_per_s / other.last.decode_tokens_per_s;
  const text = box.output === other.output
    ? `The same text as ${plain}`
    : `Another text than ${plain}` + (Number(at("temperature").value) > 0 ? ": above temperature 0 each run draws" : "");
  const verdict = element("p", { class: "verdict" },
    text + (Number.isFinite(faster) ? `, ${faster.toFixed(2)} × its speed.` : "."),
    element("small", {}, " One run of each, both read the whole prompt; ddtree-trt bench compares fairly."));
  const busy = box.busy ?? other.busy;
  if (busy) verdict.append(element("strong", { class: "busy" }, ` ${busy}`));
  atBottom(() => turn.append(verdict));
}

function setRunning(on) {
  const [from, to] = on ? ["send", "stop"] : ["stop", "send"];
  const focused = document.activeElement === at(from);
  at(from).hidden = true;
  at(to).hidden = false;
  if (focused) at(to).focus();
}

// ---- rounds

function clearRounds(box) {
  pause();
  shown?.text.querySelectorAll(".shown").forEach((piece) => piece.classList.remove("shown"));
  rounds = [];
  shown = box;
  following = true;
  at("rounds").hidden = true;
}

// Parts and rounds come together but for the first token and for text that waits for its character.
function takeRounds(event, box) {
  const before = box.last?.stage_s ?? {};
  const times = Object.entries(event.figures.stage_s).map(([name, s]) => [name, s - (before[name] ?? 0)]);
  const step = box.steps.length - 1;
  for (const record of event.rounds) rounds.push({ ...record, step, times, together: event.rounds.length });
  at("round").max = Math.max(rounds.length, 1);
  at("rounds").hidden = !rounds.length;
}

// The first of those that wrote most tokens.
function bestRound() {
  const accepted = rounds.map((record) => record.path.length);
  return 1 + accepted.indexOf(Math.max(...accepted));
}

function showRound(number) {
  const record = rounds[number - 1];
  const said = caption(record);
  at("round").value = number;
  at("round").setAttribute("aria-valuetext", `round ${number} of ${rounds.length}: ${said}`);
  at("place").textContent = `${number} of ${rounds.length}` + (shown.done && number === bestRound() ? ", the best" : "");
  at("caption").textContent = said;
  at("times").textContent = record.times.filter(([, s]) => s > 0)
    .map(([name, s]) => `${WORDS[name]} ${(1000 * s).toFixed(2)} ms`).join(", ")
    + (record.together > 1 ? ` (${record.together} rounds)` : "");
  for (const piece of shown.text.querySelectorAll(".step")) {
    piece.classList.toggle("shown", Number(piece.dataset.step) === record.step);
  }
  drawTree(record, at("drawing"));
  at("list").replaceChildren(asList(record));
}

// A round that the user chose: the latest is no longer followed, and its text comes into view.
function chooseRound(number) {
  following = false;
  showRound(number);
  shown.text.querySelector(".shown")?.scrollIntoView({ block: "nearest" });
}

function pause() {
  clearInterval(playing);
  playing = null;
  at("play").textContent = "Play";
}

function play() {
  at("play").textContent = "Pause";
  const here = Number(at("round").value);
  chooseRound(here < rounds.length && !following ? here : 1);
  playing = setInterval(() => {
    const next = Number(at("round").value) + 1;
    if (next <= rounds.length) chooseRound(next);
    if (next >= rounds.length && !running) pause();
  }, PLAY_MS);
}

// ---- what the user does

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (at("form").reportValidity()) send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  clearRounds(null);
  at("turns").replaceChildren();
  at("turns").hidden = true;
  at("start").hidden = false;
  at("message").focus();
});
at("round").addEventListener("input", () => {
  pause();
  chooseRound(Number(at("round").value));
});
at("play").addEventListener("click", () => (playing === null ? play() : pause()));
at("turns").addEventListener("click", (event) => {
  const step = event.target.closest(".step");
  if (!step || !shown?.text.contains(step)) return;
  const place = rounds.findLastIndex((record) => record.step === Number(step.dataset.step));
  if (place < 0) return;
  pause();
  chooseRound(place + 1);
});

loadEngine().catch((error) => complain(error.message));
