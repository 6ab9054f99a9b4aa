// Conversations, kept for this tab until it is closed or the key of the server is forgotten.
const PREFIX = "dragoman-chat/";

export function loadConversation(name) {
  try {
    const { messages, settings } = JSON.parse(sessionStorage.getItem(PREFIX + name));
    return { messages, settings };
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
