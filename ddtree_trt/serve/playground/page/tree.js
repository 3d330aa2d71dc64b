// One round's tree: as a drawing, as a list, and in a sentence.

const MOST_DRAWN = 160; // nodes; further ones are counted in the caption

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function caption(record) {
  const size = record.nodes.length
    ? `${record.nodes.length} guesses, ${record.path.length} accepted`
    : "Nothing guessed";
  const hidden = record.nodes.length > MOST_DRAWN ? `; the ${MOST_DRAWN} most probable are drawn` : "";
  const d = record.decision;
  const why = !d ? "" : d.drafted
    ? ` Expected: ${d.expected_tokens.toFixed(1)} tokens in ${(1000 * d.expected_s).toFixed(2)} ms; without guesses one`
      + ` takes ${(1000 * d.single_token_s).toFixed(2)} ms: ${d.expected_gain.toFixed(2)} × the speed`
      + `${d.probe ? " (a trial)" : ""}.`
    : " Guessing does not pay at present.";
  return `${size}${hidden}. Written: ${JSON.stringify(record.emitted.join(""))}.${why}`;
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

// Draws into `box`, scrolled to the root.
export function drawTree(record, box) {
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
  box.replaceChildren(svg);
  box.scrollTo(0, nodes[0].y - box.clientHeight / 2);
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

export function asList(record) {
  const item = (node) => {
    const mark = node.accepted ? " ✓ accepted" : "";
    const made = element("li", {}, `${JSON.stringify(node.text)} ${node.depth ? node.probability.toFixed(3) : "root"}${mark}`);
    if (node.children.length) made.append(element("ul", {}, ...node.children.map(item)));
    return made;
  };
  return element("ul", {}, item(shape(record)[0]));
}
