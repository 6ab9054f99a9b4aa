// Markdown as elements of the page, never as markup. The time is linear in the length of the text, whatever it contains,
// and the depth of elements is bounded. An unfinished text, as it comes from a model, is rendered as far as it goes.
//
// Blocks are found line by line, and the inline elements of a block when it is shown: while a text grows, only its last
// block is parsed again. Unlike CommonMark, a line break is kept, lines of four spaces are no code, and `---` is a line.
import { CodeBlock } from "./code_block.js";
import { html, useMemo } from "./html.js";

const MAX_BLOCKS = 8; // lists and quotes within each other
const MAX_INLINE = 12;
const MAX_URL = 2000; // characters
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const QUOTE = /^ {0,3}> ?/;
const CELL = /^:?-+:?$/;

const indentOf = (line) => line.length - line.trimStart().length;

function isRule(line) {
  const bare = line.replaceAll(" ", "");
  return bare.length > 2 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

// --- blocks --------------------------------------------------------------------------------------------------

// The cells of a line of a table; `\|` is no border.
function cellsOf(line) {
  const cells = line.trim().replaceAll("\\|", "\0").split("|").map((cell) => cell.replaceAll("\0", "|").trim());
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells;
}

// The alignments of a table whose second line this is, null if it is none.
function alignments(header, line) {
  if (!line?.includes("-") || !header.includes("|")) return null;
  const cells = cellsOf(line);
  if (!cells.every((cell) => CELL.test(cell)) || cells.length !== cellsOf(header).length) return null;
  return cells.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
}

const startsBlock = (line) => HEADING.test(line) || FENCE.test(line) || QUOTE.test(line) || ITEM.test(line) || isRule(line);

function fence(lines, start, [, mark, language]) {
  const indent = indentOf(lines[start]);
  const isEnd = (line) => line.trim().startsWith(mark) && line.trim() === mark[0].repeat(line.trim().length);
  let end = start + 1;
  while (end < lines.length && !isEnd(lines[end])) end++;
  const code = lines.slice(start + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return [{ kind: "code", language: language.trim().split(" ")[0], text: code.join("\n") }, end + 1];
}

function quote(lines, start, depth) {
  let end = start;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !startsBlock(lines[end])))) end++;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: parseLines(inner, depth + 1) }, end];
}

// Lines that are indented by two belong to an item: models do not count the width of "1. ".
function list(lines, start, depth) {
  const isOrdered = (marker) => marker.length > 1;
  const [, , first] = ITEM.exec(lines[start]);
  const items = [];
  let at = start;
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || isRule(lines[at]) || isOrdered(match[2]) !== isOrdered(first) || match[2].at(-1) !== first.at(-1)) break;
    const width = match[0].length - Math.max(0, match[3].length - 1);
    const inner = [lines[at].slice(match[0].length)];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      if (line.trim() === "") {
        if (at + 1 >= lines.length || indentOf(lines[at + 1]) < 2) break;
        inner.push("");
      } else if (indentOf(line) >= 2) inner.push(line.slice(Math.min(indentOf(line), Math.max(2, width))));
      else if (lines[at - 1].trim() && !startsBlock(line)) inner.push(line);
      else break;
    }
    items.push(parseLines(inner, depth + 1));
    let next = at;
    while (next < lines.length && lines[next].trim() === "") next++;
    if (next < lines.length && ITEM.test(lines[next])) at = next;
  }
  return [{ kind: "list", start: isOrdered(first) ? parseInt(first, 10) : null, items }, at];
}

function table(lines, start, aligned) {
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
  const rows = [lines[start], ...lines.slice(start + 2, end)].map((line) => {
    const cells = cellsOf(line);
    return aligned.map((_, i) => cells[i] ?? "");
  });
  return [{ kind: "table", aligned, rows }, end];
}

function paragraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !alignments(lines[end], lines[end + 1])) end++;
  return [{ kind: "paragraph", text: lines.slice(start, end).map((line) => line.trim()).join("\n") }, end];
}

function parseBlock(lines, start, depth) {
  const line = lines[start];
  const open = FENCE.exec(line);
  if (open) return fence(lines, start, open);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim();
    const closing = text.lastIndexOf(" #");
    const isClosed = closing >= 0 && text.slice(closing + 1) === "#".repeat(text.length - closing - 1);
    return [{ kind: "heading", level: heading[1].length, text: isClosed ? text.slice(0, closing) : text }, start + 1];
  }
  if (isRule(line)) return [{ kind: "rule" }, start + 1];
  if (depth < MAX_BLOCKS && QUOTE.test(line)) return quote(lines, start, depth);
  if (depth < MAX_BLOCKS && ITEM.test(line)) return list(lines, start, depth);
  const aligned = alignments(line, lines[start + 1]);
  return aligned ? table(lines, start, aligned) : paragraph(lines, start);
}

function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const [block, end] = parseBlock(lines, at, depth);
    if (depth === 0) block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

export const parseMarkdown = (text) => parseLines(text.replaceAll("\t", "    ").split(/\r?\n/), 0);

// --- inline --------------------------------------------------------------------------------------------------

const isSpace = (c) => c === undefined || /\s/.test(c);
const isPunctuation = (c) => c !== undefined && /[\p{P}\p{S}]/u.test(c);

// The address in parentheses after a text in brackets, as [address, position after it]; null if there is none.
function destination(text, start) {
  const limit = Math.min(text.length, start + MAX_URL);
  let depth = 0;
  for (let i = start; i < limit; i++) {
    const c = text[i];
    if (c === "(") depth++;
    else if (c === ")" && --depth === 0) {
      const [address] = text.slice(start + 1, i).trim().split(/\s/); // a title may follow
      return [address.startsWith("<") && address.endsWith(">") ? address.slice(1, -1) : address, i + 1];
    } else if (c === "\n") return null;
  }
  return null;
}

// The address if a page may be opened there by a click, else null.
export function safeAddress(address) {
  try {
    const { protocol, href } = new URL(address);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null; // an address relative to this page is none of the model's
  }
}

// Where each run of backticks of a length begins, to find the end of code without a search for each.
function backticks(text) {
  const starts = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!starts.has(run.length)) starts.set(run.length, { positions: [], next: 0 });
    starts.get(run.length).positions.push(index);
  }
  return starts;
}

const BARE = /https?:\/\/[^\s<>"`*|]+/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const LINE_BREAK = /<br ?\/?>/iy;
const ENTITY = /&(#?\w{2,5});/y;
const MATHS = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };

// Parse the text of a block as nodes: strings and { kind, children | text, address }.
export function parseInline(text) {
  const out = []; // nodes; what stands between a delimiter and its end is moved into a node
  const openers = { "*": [], _: [], "~": [] }; // by position in `out`
  let brackets = [];
  const ticks = backticks(text);
  const missing = new Set(); // ends of maths that do not come any more
  let plain = "";
  let at = 0;

  const flush = () => {
    if (plain) out.push(plain);
    plain = "";
  };
  const depthOf = (nodes) => nodes.reduce((most, node) => Math.max(most, node.depth ?? 0), 0);
  // Delimiters within a node that was made are text.
  const forget = (index) => {
    for (const stack of Object.values(openers)) while (stack.at(-1)?.index >= index) stack.pop();
    while (brackets.at(-1)?.index >= index) brackets.pop();
  };
  const wrap = (index, kind, more = {}) => {
    const children = out.splice(index);
    out.push({ kind, children, depth: depthOf(children) + 1, ...more });
  };
  const match = (sticky) => {
    sticky.lastIndex = at;
    return sticky.exec(text);
  };

  function delimiters(mark) {
    let end = at;
    while (text[end] === mark) end++;
    const [before, after] = [text[at - 1], text[end]];
    const opensLeft = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const closesRight = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const canOpen = opensLeft && (mark !== "_" || !closesRight || isPunctuation(before));
    const canClose = closesRight && (mark !== "_" || !opensLeft || isPunctuation(after));
    let count = end - at;
    at = end;
    flush();
    const stack = openers[mark];
    while (canClose && count > 0 && stack.length > 0) {
      const opener = stack.at(-1);
      const isOdd = (opener.canClose || canOpen) && (opener.count + count) % 3 === 0 && (opener.count % 3 || count % 3);
      const used = mark === "~" ? 2 : Math.min(2, opener.count, count);
      if (isOdd || Math.min(opener.count, count) < used) break;
      if (depthOf(out.slice(opener.index + 1)) >= MAX_INLINE) {
        stack.length = 0; // also the others around it would be too deep
        break;
      }
      forget(opener.index + 1);
      wrap(opener.index + 1, mark === "~" ? "del" : used === 2 ? "strong" : "em");
      opener.count -= used;
      count -= used;
      out[opener.index] = mark.repeat(opener.count);
      if (opener.count === 0) stack.pop();
    }
    if (count === 0) return;
    out.push(mark.repeat(count));
    if (canOpen && (mark !== "~" || count === 2)) stack.push({ index: out.length - 1, count, canClose });
  }

  function closeBracket() {
    const found = text[at + 1] === "(" && brackets.length > 0 ? destination(text, at + 1) : null;
    flush();
    const opener = brackets.pop();
    const isTooDeep = opener && found && depthOf(out.slice(opener.index + 1)) >= MAX_INLINE;
    if (isTooDeep) brackets = [];
    if (!opener || !found || isTooDeep) {
      out.push("]");
      at++;
      return;
    }
    at = found[1];
    forget(opener.index);
    out[opener.index] = "";
    wrap(opener.index + 1, opener.isImage ? "image" : "link", { address: found[0] });
    if (!opener.isImage) brackets = []; // no links within links
  }

  function code() {
    let end = at;
    while (text[end] === "`") end++;
    const run = ticks.get(end - at);
    while (run.positions[run.next] <= at) run.next++;
    const close = run.positions[run.next];
    if (close === undefined) {
      plain += text.slice(at, end);
      at = end;
      return;
    }
    const inner = text.slice(end, close).replaceAll("\n", " ");
    const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
    flush();
    out.push({ kind: "code", text: isPadded ? inner.slice(1, -1) : inner });
    at = close + (end - at);
  }

  // TeX is shown as it is, and not as emphasis and escapes.
  function maths(open) {
    const close = MATHS[open];
    const end = missing.has(close) ? -1 : text.indexOf(close, at + 2);
    if (end < 0) {
      missing.add(close);
      return false;
    }
    flush();
    out.push({ kind: "code", text: text.slice(at + 2, end).trim() });
    at = end + 2;
    return true;
  }

  function link(address, length) {
    flush();
    out.push({ kind: "link", address, children: [address.replace(/^mailto:/, "")] });
    at += length;
  }

  function bareAddress() {
    const found = isSpace(text[at - 1]) || isPunctuation(text[at - 1]) ? match(BARE)?.[0] : null;
    if (!found) return false;
    let length = Math.min(found.length, MAX_URL);
    while (length > 0 && (".,;:!?'_~]".includes(found[length - 1]) || (found[length - 1] === ")" && !found.includes("(")))) length--;
    link(found.slice(0, length), length);
    return true;
  }

  function special(c) {
    const open = text.slice(at, at + 2);
    if (MATHS[open] && maths(open)) return true;
    if (c === "\\" && text[at + 1] === "\n") return at++, true;
    if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      return true;
    }
    if (c === "\n" || (c === "<" && match(LINE_BREAK))) {
      flush();
      out.push({ kind: "break" });
      at += c === "\n" ? 1 : LINE_BREAK.lastIndex - at;
      return true;
    }
    if (c === "<") {
      const found = match(ANGLE);
      if (found) return link(found[1], found[0].length), true;
    }
    if (c === "&") {
      const found = match(ENTITY);
      if (found && ENTITIES[found[1]]) {
        plain += ENTITIES[found[1]];
        at += found[0].length;
        return true;
      }
    }
    if (c === "h" && bareAddress()) return true;
    if (c === "`") return code(), true;
    if (openers[c]) return delimiters(c), true;
    if (c === "[" || open === "![") {
      flush();
      const isImage = c === "!";
      out.push(isImage ? "![" : "[");
      brackets.push({ index: out.length - 1, isImage });
      at += isImage ? 2 : 1;
      return true;
    }
    if (c === "]") return closeBracket(), true;
    return false;
  }

  while (at < text.length) {
    if (!special(text[at]) && at < text.length) plain += text[at++];
  }
  flush();
  return out.filter((node) => node !== "");
}

// --- elements ------------------------------------------------------------------------------------------------

const textOf = (nodes) => nodes.map((node) => (typeof node === "string" ? node : node.text ?? textOf(node.children ?? []))).join("");

function Link({ address, children }) {
  const href = safeAddress(address);
  return href ? html`<a href=${href} target="_blank" rel="noopener noreferrer">${children}</a>` : html`<span title=${address}>${children}</span>`;
}

function inlineElements(nodes, isInLink = false) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.kind === "break") return html`<br />`;
    if (node.kind === "code") return html`<code>${node.text}</code>`;
    if (node.kind === "image") {
      const label = `picture: ${textOf(node.children) || node.address}`; // of another host, which must not see the reader
      return isInLink ? label : html`<${Link} address=${node.address}>${label}</${Link}>`;
    }
    if (node.kind === "link") return html`<${Link} address=${node.address}>${inlineElements(node.children, true)}</${Link}>`;
    return html`<${node.kind}>${inlineElements(node.children, isInLink)}</${node.kind}>`;
  });
}

const inline = (text) => inlineElements(parseInline(text));
const TASK = /^\[([ xX])\] /;

function Item({ blocks }) {
  const [first, ...rest] = blocks;
  if (first?.kind !== "paragraph") return html`<li>${blocks.map(element)}</li>`;
  const task = TASK.exec(first.text);
  const text = task ? `${task[1] === " " ? "☐" : "☑"} ${first.text.slice(4)}` : first.text;
  return html`<li class=${task ? "task" : undefined}><p>${inline(text)}</p>${rest.map(element)}</li>`;
}

function Table({ aligned, rows: [header, ...rows] }) {
  const cells = (row, tag) => row.map((cell, i) => html`<${tag} scope=${tag === "th" ? "col" : undefined} class=${aligned[i]}>${inline(cell)}</${tag}>`);
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Table"><table><thead><tr>${cells(header, "th")}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody></table></div>`;
}

function element(block) {
  switch (block.kind) {
    case "heading": return html`<h3 class=${`level-${block.level}`}>${inline(block.text)}</h3>`;
    case "code": return html`<${CodeBlock} language=${block.language} text=${block.text} />`;
    case "rule": return html`<hr />`;
    case "quote": return html`<blockquote>${block.blocks.map(element)}</blockquote>`;
    case "table": return html`<${Table} ...${block} />`;
    case "list": {
      const items = block.items.map((blocks) => html`<${Item} blocks=${blocks} />`);
      return block.start === null ? html`<ul>${items}</ul>` : html`<ol start=${block.start}>${items}</ol>`;
    }
    default: return html`<p>${inline(block.text)}</p>`;
  }
}

const Block = ({ block }) => useMemo(() => element(block), [block.source]);

export function Markdown({ text }) {
  const blocks = useMemo(() => parseMarkdown(text), [text]);
  return html`<div class="markdown">${blocks.map((block) => html`<${Block} block=${block} />`)}</div>`;
}
