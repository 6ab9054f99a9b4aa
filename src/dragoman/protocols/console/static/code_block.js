// A block of code with its language, a button that copies it, and colours.
import { CopyButton } from "./copy.js";
import { html, useMemo } from "./html.js";

const MAX_COLOURED = 50_000; // characters; longer code is plain

const KEYWORDS = new Set(
  `abstract and as assert async await bool boolean break case catch char class const continue def default del delete do done
  double elif else end enum esac except export extends extern false False fi final finally float fn for foreach from func
  function global go if impl implements import in include int interface is lambda let local long loop match mod module move
  mut namespace new nil None nonlocal not null or package pass private protected pub public raise return self short static
  string struct super switch then this throw trait true True try type typedef typeof undefined unsigned use using var virtual
  void while with yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT ON GROUP BY ORDER LIMIT
  AND OR NOT NULL AS`.split(/\s+/),
);
const SLASHES = "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
const HASH = "#[^\\n]*";
const COMMENTS = { sql: "--[^\\n]*", lua: "--[^\\n]*", haskell: "--[^\\n]*", html: "<!--[^]*?(?:-->|$)", xml: "<!--[^]*?(?:-->|$)", json: "(?!)", css: "/\\*[^]*?(?:\\*/|$)" };
for (const name of ["python", "py", "bash", "sh", "shell", "yaml", "yml", "toml", "ruby", "r", "perl", "dockerfile", "makefile", "julia"]) COMMENTS[name] = HASH;
const STRINGS = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'|`(?:[^`\\\\]|\\\\[^])*`?';
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "output", "markdown", "md", "console"]);

// Colours by words that most languages share: comments, strings, numbers and keywords. In one pass over the text.
function coloured(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MAX_COLOURED) return text;
  const tokens = new RegExp(`(${COMMENTS[name] ?? SLASHES})|(${STRINGS})|\\b(\\d[\\w.]*)|([A-Za-z_$][\\w$]*)(?=(\\(?))`, "g");
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(tokens)) {
    const [found, comment, string, number, word, call] = match;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : call ? "call" : "";
    if (!kind) continue;
    parts.push(text.slice(end, match.index), html`<span class=${`code-${kind}`}>${found}</span>`);
    end = match.index + found.length;
  }
  return [...parts, text.slice(end)];
}

export function CodeBlock({ language, text }) {
  const parts = useMemo(() => coloured(text, language), [text, language]);
  return html`<div class="code-block"><div class="code-title"><span>${language || "code"}</span>
      <${CopyButton} text=${text} describes="Copy the code" /></div>
    <pre tabindex="0" role="group" aria-label=${`Code${language ? ` in ${language}` : ""}`}><code>${parts}</code></pre></div>`;
}
