// The playground: a chat, and beside it the tree of every round. Talks to this server only.

const at = (id) => document.getElementById(id);
const MOST_DRAWN = 160; // nodes; further ones are counted in the caption
const STAGES = ["draft", "tree_build", "tree_compile", "verify", "commit", "device_round", "prefill"];

let engine = null;
let messages = []; // of the chat so far
let rounds = []; // of the answer that is shown, with the element of each one's text
let running = null; // AbortController of the answer in progress

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

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
    return "This server asks for an API key: give it below the settings and send again.";
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
  at("method").replaceChildren(...engine.methods.map((m) => element("option", { value: m }, m)));
  const budgets = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].filter((b) => b <= engine.max_tree_budget);
  at("budget").replaceChildren(...["auto", ...budgets].map((b) => element("option", { value: b }, String(b))));
  at("tokens").max = engine.max_seq_len;
}

function settings(method) {
  const budget = at("budget").value;
  const drafts = method !== "ar";
  return {
    method,
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    max_tokens: Number(at("tokens").value),
    ...(drafts ? { tree_budget: budget === "auto" ? "auto" : Number(budget) } : {}),
  };
}

// ---- answers

function answerBox(turn, method) {
  const text = element("p", { class: "text" });
  const figures = element("p", { class: "figures" });
  const times = element("table", { class: "times" }, element("caption", { class: "figures" }, "Time by stage"));
  turn.append(element("div", { class: "answer", "data-method": method }, element("h3", {}, method), text, figures, times));
  return { text, figures, times, output: "", last: null };
}

function showFigures(box, figures, done) {
  box.last = figures;
  const speed = figures.decode_tokens_per_s;
  box.figures.textContent = `${figures.output_tokens} tokens in ${figures.rounds} rounds, `
    + `${figures.tokens_per_round.toFixed(2)} tokens a round`
    + (speed ? `, ${speed.toFixed(1)} tokens/s` : "");
  if (!done) return;
  const rows = STAGES.filter((stage) => figures.stage_s[stage] > 0).map((stage) =>
    element("tr", {}, element("th", { scope: "row" }, stage),
      element("td", {}, `${(1000 * figures.stage_s[stage]).toFixed(1)} ms`)));
  box.times.append(element("tbody", {}, ...rows));
}

async function answer(turn, method, follow) {
  const box = answerBox(turn, method);
  turn.setAttribute("aria-busy", "true");
  const response = await fetch("/playground/rounds", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({ messages, ...settings(method) }),
  });
  if (!response.ok) throw new Error(await refusal(response));
  if (follow) clearRounds();
  let stages = {};
  for await (const event of events(response)) {
    box.output += event.text;
    const step = element("span", { class: "step" }, event.text);
    box.text.append(step);
    if (follow) takeRounds(event, step, stages);
    stages = event.figures.stage_s;
    showFigures(box, event.figures, event.finish_reason !== null);
  }
  return box;
}

async function send() {
  const said = at("message").value;
  if (!said.trim() || running) return;
  complain("");
  const answers = element("div", { class: "answers" });
  const turn = element("article", { class: "turn" }, element("p", { class: "said" }, said), answers);
  running = new AbortController();
  setRunning(true);
  try {
    if (!engine) await loadEngine();
    messages.push({ role: "user", content: said });
    at("turns").append(turn);
    const method = at("method").value;
    const box = await answer(answers, method, true);
    at("message").value = "";
    if (at("beside").checked && method !== "ar") compare(turn, box, await answer(answers, "ar", false));
    messages.push({ role: "assistant", content: box.output });
  } catch (error) {
    if (messages.at(-1)?.role === "user") messages.pop(); // the next message does not build on half an answer
    complain(error.name === "AbortError" ? "Stopped." : error.message);
  }
  answers.removeAttribute("aria-busy");
  running = null;
  setRunning(false);
}

function compare(turn, box, ar) {
  const same = box.output === ar.output;
  const faster = box.last.decode_tokens_per_s / ar.last.decode_tokens_per_s;
  turn.append(element("p", { class: "verdict" },
    `identical: ${same ? "yes" : "no"}` + (Number.isFinite(faster) ? ` · ${faster.toFixed(2)} × the speed of ar` : ""),
    element("small", {}, " (one run of each; ddtree-trt bench compares fairly)")));
}

function setRunning(on) {
  at("send").disabled = on;
  at("stop").disabled = !on;
}

// ---- rounds

function clearRounds() {
  rounds = [];
  at("round").disabled = true;
  at("place").textContent = "none yet";
}

// Parts and rounds come together but for the first token and for text that waits for its character.
function takeRounds(event, step, before) {
  const slider = at("round");
  const following = !rounds.length || Number(slider.value) === rounds.length;
  const times = Object.entries(event.figures.stage_s).map(([name, s]) => [name, s - (before[name] ?? 0)]);
  for (const record of event.rounds) rounds.push({ ...record, step, times, together: event.rounds.length });
  if (event.rounds.length) {
    const place = rounds.length;
    step.addEventListener("click", () => showRound(place));
  }
  if (!rounds.length) return;
  slider.disabled = false;
  slider.max = rounds.length;
  if (following) showRound(rounds.length);
  else at("place").textContent = `${slider.value} of ${rounds.length}`;
}

function showRound(number) {
  const record = rounds[number - 1];
  at("round").value = number;
  at("round").setAttribute("aria-valuetext", `round ${number} of ${rounds.length}: ${caption(record)}`);
  at("place").textContent = `${number} of ${rounds.length}`;
  at("caption").textContent = caption(record);
  for (const each of rounds) each.step.classList.toggle("shown", each.step === record.step);
  drawTree(record);
  at("list").replaceChildren(asList(record));
}

function caption(record) {
  const tokens = record.emitted.map((t) => JSON.stringify(t)).join(" ");
  const size = record.nodes.length
    ? `${record.nodes.length} nodes, ${record.path.length} accepted`
    : "nothing drafted";
  const hidden = record.nodes.length > MOST_DRAWN ? `; the ${MOST_DRAWN} most probable are drawn` : "";
  const d = record.decision;
  const why = !d ? "" : d.drafted
    ? ` Expected: ${d.expected_tokens.toFixed(1)} tokens, ${d.expected_gain.toFixed(2)} × ar${d.probe ? ", a probe" : ""}.`
    : " Drafting does not pay at present.";
  const times = record.times.filter(([, s]) => s > 0).map(([name, s]) => `${name} ${(1000 * s).toFixed(2)} ms`);
  const shared = record.together > 1 ? ` (${record.together} rounds)` : "";
  return `${size}${hidden}. Output: ${tokens}.${why} ${times.join(", ")}${shared}`;
}

// The root, the drawn nodes, and whether each is accepted; children in the drafter's order.
function shape(record) {
  const accepted = new Set([0, ...record.path]);
  const nodes = [{ text: record.root, probability: 1, children: [], depth: 0, accepted: true }];
  record.nodes.forEach(([text, parent, probability], index) => {
    if (index >= MOST_DRAWN && !accepted.has(index + 1)) return void nodes.push(null);
    const above = nodes[parent];
    const node = { text, probability, children: [], depth: above.depth + 1, accepted: accepted.has(index + 1) };
    above.children.push(node);
    nodes.push(node);
  });
  return nodes.filter((node) => node !== null);
}

const label = (node) => (node.accepted ? "✓" : "") + JSON.stringify(node.text).slice(1, -1).replaceAll(" ", "␣");

function drawTree(record) {
  const nodes = shape(record);
  const widths = [];
  for (const node of nodes) {
    node.width = 8 * Math.max([...label(node)].length, 4) + 12;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = widths.map((_, depth) => 8 + widths.slice(0, depth).reduce((sum, w) => sum + w + 34, 0));
  let leaves = 0;
  const place = (node) => {
    node.x = lefts[node.depth];
    node.children.forEach(place);
    node.y = node.children.length
      ? (node.children[0].y + node.children.at(-1).y) / 2
      : 20 + 36 * leaves++;
  };
  place(nodes[0]);
  const width = lefts.at(-1) + widths.at(-1) + 8;
  const svg = shapeOf("svg", { width, height: 36 * leaves + 12, role: "img", "aria-label": caption(record) });
  for (const node of nodes) {
    for (const child of node.children) {
      const [x1, x2] = [node.x + node.width, child.x];
      const middle = (x1 + x2) / 2;
      svg.append(shapeOf("path", {
        class: child.accepted ? "edge accepted" : "edge",
        d: `M${x1} ${node.y}C${middle} ${node.y} ${middle} ${child.y} ${x2} ${child.y}`,
      }));
    }
  }
  nodes.forEach((node) => svg.append(drawNode(node)));
  at("drawing").replaceChildren(svg);
}

function drawNode(node) {
  const group = shapeOf("g", node.accepted ? { class: "accepted" } : {});
  const box = shapeOf("rect", { x: node.x, y: node.y - 15, width: node.width, height: 30, rx: 5 });
  box.style.setProperty("--shade", (0.05 + 0.4 * node.probability).toFixed(3));
  const text = shapeOf("text", { x: node.x + 6, y: node.y - 1 }, label(node));
  const probability = shapeOf("text", { x: node.x + 6, y: node.y + 11 }, node.depth ? node.probability.toFixed(2) : "root");
  group.append(box, text, probability);
  return group;
}

function shapeOf(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function asList(record) {
  const item = (node) => {
    const mark = node.accepted ? " ✓ accepted" : "";
    const made = element("li", {}, `${JSON.stringify(node.text)} ${node.depth ? node.probability.toFixed(3) : "root"}${mark}`);
    if (node.children.length) made.append(element("ul", {}, ...node.children.map(item)));
    return made;
  };
  return element("ul", {}, item(shape(record)[0]));
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
  at("turns").replaceChildren();
  at("drawing").replaceChildren();
  at("list").replaceChildren();
  at("caption").textContent = "";
  clearRounds();
  at("message").focus();
});
at("round").addEventListener("input", () => showRound(Number(at("round").value)));

loadEngine().catch((error) => complain(error.message));
