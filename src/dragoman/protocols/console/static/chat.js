// The chat with a text model: the conversation, and below it the box for the next message. Without a chat template, the
// same for completions of a text.
import { storedKey } from "./api.js";
import { Composer } from "./chat_composer.js";
import { dataUrl } from "./chat_images.js";
import { Message } from "./chat_message.js";
import { loadConversation, saveConversation } from "./chat_storage.js";
import { defaultsOf, isPart, requestOf, respond } from "./chat_stream.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

const END_PX = 4; // so near to its end the page follows an answer
const QUESTIONS = [
  "What is photosynthesis? Answer in one sentence.",
  "Write a Python function that tests whether a word is a palindrome.",
  "Give three tips for a good night's sleep.",
];
const BEGINNINGS = ["Once upon a time", "The three most important rules of good code are", "def fibonacci(n):"];

// Scroll with the end of the page until the reader scrolls up; return whether it is followed, and a function that goes there.
function useFollowedEnd(changes) {
  const [isAtEnd, setAtEnd] = useState(true);
  const follows = useRef(true);
  const position = useRef(scrollY);
  const toEnd = () => {
    follows.current = true;
    scrollTo(0, document.documentElement.scrollHeight);
    position.current = scrollY; // its event may come together with one of the reader
  };
  useEffect(() => {
    const scrolled = () => {
      const end = document.documentElement.scrollHeight - innerHeight - END_PX;
      if (scrollY >= end) follows.current = true;
      else if (scrollY < position.current) follows.current = false;
      position.current = scrollY;
      setAtEnd(follows.current || scrollY >= end);
    };
    addEventListener("scroll", scrolled, { passive: true });
    return () => removeEventListener("scroll", scrolled);
  }, []);
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  }, changes);
  return [isAtEnd, toEnd];
}

function Welcome({ isChat, takesImages, onAsk }) {
  return html`<div class="chat-welcome"><h2>${isChat ? "What can I do for you?" : "Begin a text."}</h2>
    <p class="note">${isChat ? "Ask something, or try one of these." : "The model continues it: it has no chat template, or the settings say so."}
      ${takesImages && " Pictures too: drop, paste or choose one."}</p>
    <div class="chat-suggestions">${(isChat ? QUESTIONS : BEGINNINGS).map((text) => html`<button type="button" onClick=${() => onAsk(text)}>${text}</button>`)}</div></div>`;
}

export function Chat({ name, details }) {
  const [stored] = useState(() => loadConversation(name));
  const [messages, setMessages] = useState(stored.messages);
  const [settings, setSettings] = useState({ ...defaultsOf(details), ...stored.settings });
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState([]);
  const [editing, setEditing] = useState(null); // the place of the question that the next message replaces
  const [problem, setProblem] = useState(null); // an Error
  const [running, setRunning] = useState(null);
  const input = useRef(null);
  const current = useRef({ messages, settings, running: null });
  const { mode } = settings;
  const [isAtEnd, toEnd] = useFollowedEnd([messages]);

  const [key] = useState(storedKey);
  const save = () => key === storedKey() && saveConversation(name, current.current); // else it was forgotten with the key
  const show = (shown) => setMessages((current.current.messages = shown));
  const changeSettings = (changed) => {
    setSettings((current.current.settings = changed));
    setProblem(null);
    save();
  };
  const run = (abort) => setRunning((current.current.running = abort));

  // Not on a phone, where a keyboard would cover the page.
  const focusInput = () => matchMedia("(hover: hover)").matches && input.current.focus({ preventScroll: true });

  useEffect(() => {
    if (["BODY", "MAIN"].includes(document.activeElement.tagName)) focusInput();
    const leave = () => {
      current.current.running?.abort();
      save();
    };
    addEventListener("pagehide", leave);
    return () => {
      removeEventListener("pagehide", leave);
      leave();
    };
  }, []);
  useEffect(() => {
    if (!running) return undefined;
    const stop = (event) => event.key === "Escape" && running.abort();
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, [running]);

  // Ask for the answer to a conversation, or for more of the one at its end. Returns false if the settings are wrong.
  function ask(history) {
    let request;
    try {
      request = requestOf(name, details, settings, history);
    } catch (error) {
      setProblem(error);
      return false;
    }
    setProblem(null);
    setEditing(null);
    toEnd();
    focusInput(); // the button that was pressed may be gone
    if (isPart(history)) answer(request, history.slice(0, -1), history.at(-1));
    else answer(request, history, null);
    return true;
  }

  // Show an answer as it grows, once a frame.
  async function answer(request, history, part) {
    const abort = new AbortController();
    run(abort);
    let frame = 0;
    let latest = null;
    const showLatest = () => {
      frame = 0;
      if (current.current.running === abort) show([...history, { ...latest }]);
    };
    for await (const message of respond(request, abort.signal, part)) {
      latest = message;
      frame ||= requestAnimationFrame(showLatest);
    }
    cancelAnimationFrame(frame); // none come while the page is in the background
    if (current.current.running !== abort) return; // a new chat has begun
    showLatest();
    run(null);
    save();
  }

  function send(text, pictures = []) {
    const history = editing === null ? messages : messages.slice(0, editing);
    if (!ask([...history, { role: "user", text, images: pictures }])) return;
    setDraft("");
    setImages([]);
  }

  function edit(index) {
    setEditing(index);
    setDraft(messages[index].text);
    setImages(messages[index].images);
    input.current.focus();
  }

  function restart() {
    current.current.running?.abort();
    run(null);
    show([]);
    setEditing(null);
    setProblem(null);
    save();
    input.current.focus();
  }

  async function addImages(files) {
    if (!details.vision) return setProblem(new Error(`${name} takes no pictures`));
    try {
      const added = await Promise.all([...files].map(dataUrl));
      setImages((before) => [...before, ...added]);
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
    return input.current.focus();
  }

  const drop = (event) => {
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    addImages(event.dataTransfer.files);
  };
  const last = messages.length - 1;
  const lastQuestion = messages.findLastIndex(({ role }) => role === "user");
  return html`<div class="chat" onDrop=${drop} onDragOver=${(event) => event.preventDefault()}>
    <div class="messages" role="log" aria-label="Conversation" aria-live="polite" aria-busy=${running !== null}>
      ${messages.map((message, i) => html`<${Message} message=${message} isMarkdown=${mode === "chat"} showsTokens=${settings.probabilities}
        isRunning=${running !== null && i === last} isReplaced=${editing !== null && i >= editing}
        onRetry=${!running && i === last ? () => ask(messages.slice(0, i)) : null}
        onContinue=${!running && i === last ? () => ask(messages) : null}
        onEdit=${!running && i === lastQuestion ? () => edit(i) : null}
        onResults=${!running && i === last ? (results) => ask([...messages, ...results]) : null} />`)}
    </div>
    ${messages.length === 0 && html`<${Welcome} isChat=${mode === "chat"} takesImages=${details.vision} onAsk=${(text) => send(text)} />`}
    <${Composer} input=${input} mode=${mode} details=${details} draft=${draft} images=${images} settings=${settings} problem=${problem}
      isRunning=${running !== null} isEditing=${editing !== null} isEmpty=${messages.length === 0} isAtEnd=${isAtEnd}
      onDraft=${setDraft} onImages=${setImages} onFiles=${addImages} onSettings=${changeSettings} onSend=${() => send(draft, images)}
      onStop=${() => running.abort()} onNew=${restart} onEnd=${toEnd}
      onCancel=${() => (setEditing(null), setDraft(""), setImages([]))} />
  </div>`;
}
