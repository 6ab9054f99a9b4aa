// Generated tokens with their probabilities, as shade and as a table.
import { html } from "./html.js";

const MAX_LISTED = 500;

const isKnown = (logprob) => logprob !== null && logprob !== undefined;
const probability = (logprob) => Math.exp(logprob);

// Probable tokens are plain; the less likely one was, the darker its ground.
export function Tokens({ tokens }) {
  return tokens.map(({ text, logprob }) => (isKnown(logprob)
    ? html`<span class="token" style=${{ "--doubt": (1 - probability(logprob)).toFixed(3) }}
        title=${`probability ${probability(logprob).toPrecision(3)}`}>${text}</span>`
    : text));
}

export function TokenTable({ tokens }) {
  const known = tokens.filter(({ logprob }) => isKnown(logprob));
  if (known.length === 0) return null;
  return html`<details><summary>Probabilities</summary>
    <p class="note">Shade of the text: likely <span class="legend"></span> unlikely</p>
    <div class="scroll short" tabindex="0" role="region" aria-label="Probabilities of the tokens"><table>
      <thead><tr><th scope="col">token</th><th scope="col">probability</th><th scope="col">logarithm</th></tr></thead>
      <tbody>${known.slice(0, MAX_LISTED).map(({ text, logprob }) => html`<tr><td><code>${JSON.stringify(text)}</code></td>
        <td>${probability(logprob).toPrecision(3)}</td><td>${logprob.toFixed(3)}</td></tr>`)}</tbody></table></div></details>`;
}

// The tokens of a chunk of a chat, and its finish reason.
export function parseChat(chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return { tokens: [], reason: null };
  const listed = choice.logprobs?.content;
  const text = choice.delta?.content ?? "";
  const isSame = listed?.length && listed.map((t) => t.token).join("") === text;
  if (isSame) return { tokens: listed.map((t) => ({ text: t.token, logprob: t.logprob })), reason: choice.finish_reason };
  return { tokens: text ? [{ text, logprob: listed?.[0]?.logprob }] : [], reason: choice.finish_reason };
}

// The same of a completion.
export function parseCompletion(chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return { tokens: [], reason: null };
  const logprob = choice.logprobs?.token_logprobs?.[0];
  return { tokens: choice.text ? [{ text: choice.text, logprob }] : [], reason: choice.finish_reason };
}
