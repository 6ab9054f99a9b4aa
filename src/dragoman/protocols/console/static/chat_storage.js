// Conversations, kept for this tab until it is closed or the key of the server is forgotten.
import { CONNECTION_LOST } from "./chat_stream.js";

const PREFIX = "dragoman-chat/";

// An answer during which the page was left is a part of one; its connection may have been closed before the page.
function ended(each) {
  const isPart = each.role === "assistant" && !each.reason && (!each.error || each.error === CONNECTION_LOST);
  return isPart ? { ...each, reason: "stopped", error: "" } : each;
}

export function loadConversation(name) {
  try {
    const { messages, settings } = JSON.parse(sessionStorage.getItem(PREFIX + name));
    return { messages: messages.map(ended), settings };
  } catch {
    return { messages: [], settings: {} }; // none, or of another release
  }
}

export function saveConversation(name, { messages, settings }) {
  const whole = JSON.stringify({ messages, settings });
  const texts = () => JSON.stringify({ messages: messages.map((each) => ({ ...each, images: [], tokens: [] })), settings });
  try {
    sessionStorage.setItem(PREFIX + name, whole);
  } catch {
    try {
      sessionStorage.setItem(PREFIX + name, texts()); // pictures are large
    } catch {
      sessionStorage.removeItem(PREFIX + name);
    }
  }
}
