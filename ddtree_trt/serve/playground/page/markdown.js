// Markdown as DOM nodes: headings, lists, quotes, rules, code, emphasis in asterisks, links. The rest is text. No HTML
// is parsed, and links lead to http and https only, so that nothing a model writes can run.

const FENCE = /^ *(```+|~~~+)/;
const HEADING = /^ {0,3}#{1,6} +(?=\S)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])( +)(?=\S)/;
const DEEPEST = 20; // quotes and lists within each other
// Content has none of the marks around it, so that a search ends at the next mark.
const INLINE = /(?<!`)(`+)(?!`)([^`]+)\1(?!`)|(\*{1,3})(?![\s*])([^*]*[^*\s])\3(?!\*)|\[([^[\]]+)\]\((https?:\/\/[^\s()]+)\)/g;
const EMPHASES = [[], ["em"], ["strong"], ["strong", "em"]]; // by the number of asterisks

// The nodes of a source. `text(from, to)` makes those of a part of it, in which nothing is marked up.
export function markdown(source, text) {
  const lines = [];
  for (let from = 0; from <= source.length;) {
    const end = source.indexOf("\n", from);
    const to = end < 0 ? source.length : end;
    lines.push({ from, to });
    from = to + 1;
  }
  return blocks(lines, { source, text, depth: 0 });
}

function make(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

const without = (line, characters) => ({ from: line.from + characters, to: line.to });

function blocks(lines, around) {
  const way = { ...around, depth: around.depth + 1 };
  const nests = way.depth < DEEPEST;
  const words = (line) => way.source.slice(line.from, line.to);
  const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(words(line)));
  const made = [];
  let at = 0;
  const take = (belongs) => {
    const first = at;
    while (at < lines.length && belongs(lines[at])) at += 1;
    return lines.slice(first, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const said = words(line);
    if (!said.trim()) at += 1;
    else if (FENCE.test(said)) {
      const fence = FENCE.exec(said)[1];
      at += 1;
      const inside = take((each) => !words(each).trim().startsWith(fence));
      at += 1;
      made.push(make("pre", make("code", ...inside.flatMap((each) => [...way.text(each.from, each.to), "\n"]))));
    } else if (HEADING.test(said)) {
      made.push(make("h4", ...inline(without(line, HEADING.exec(said)[0].length), way)));
      at += 1;
    } else if (RULE.test(said)) {
      made.push(make("hr"));
      at += 1;
    } else if (nests && QUOTE.test(said)) {
      const inside = take((each) => QUOTE.test(words(each)));
      made.push(make("blockquote", ...blocks(inside.map((l) => without(l, QUOTE.exec(words(l))[0].length)), way)));
    } else if (nests && ITEM.test(said)) {
      made.push(list(take(belongsToList(said, words)), words, way));
    } else {
      at += 1;
      const inside = [line, ...take((each) => words(each).trim() && !begins(each))];
      made.push(make("p", ...inside.flatMap((l, i) => [...(i ? ["\n"] : []), ...inline(l, way)])));
    }
  }
  return made;
}

const indent = (said) => said.length - said.trimStart().length;

// Whether a line is of the list that begins with the item `first`: an item of its kind, or indented deeper than it, or
// the rest of an item's paragraph.
function belongsToList(first, words) {
  const [, , , number] = ITEM.exec(first);
  let blank = false;
  return (line) => {
    const said = words(line);
    const was = blank;
    blank = !said.trim();
    if (blank || indent(said) > indent(first) + 1) return true;
    const item = ITEM.exec(said);
    if (item) return (item[3] === undefined) === (number === undefined);
    return !was && ![FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(said));
  };
}

function list(lines, words, way) {
  const [, space, , number] = ITEM.exec(words(lines[0]));
  const items = [];
  let wide = 0; // characters in front of the item's content
  for (const line of lines) {
    const said = words(line);
    const item = ITEM.exec(said);
    if (item && item[1].length <= space.length + 1) {
      wide = item[0].length;
      items.push([without(line, wide)]);
    } else items.at(-1).push(without(line, Math.min(wide, indent(said))));
  }
  const made = make(number === undefined ? "ul" : "ol", ...items.map((inside) => make("li", ...blocks(inside, way))));
  if (number !== undefined) made.start = Number(number);
  return made;
}

function inline(line, way) {
  const made = [];
  let from = line.from;
  for (const match of way.source.slice(line.from, line.to).matchAll(INLINE)) {
    const [whole, tick, , stars, , shown, address] = match;
    const begin = line.from + match.index;
    const mark = (tick ?? stars ?? "[").length;
    const inner = { from: begin + mark, to: begin + mark + (match[2] ?? match[4] ?? shown).length };
    made.push(...way.text(from, begin));
    if (tick) made.push(make("code", ...way.text(inner.from, inner.to)));
    else if (stars) made.push(...EMPHASES[mark].reduceRight((nodes, name) => [make(name, ...nodes)], inline(inner, way)));
    else {
      const link = make("a", ...inline(inner, way));
      Object.assign(link, { href: address, target: "_blank", rel: "noopener noreferrer" });
      made.push(link);
    }
    from = begin + whole.length;
  }
  return [...made, ...way.text(from, line.to)];
}
