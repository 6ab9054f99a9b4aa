// Files that are dropped on an element.
import { useState } from "./html.js";

// The attributes of an element that takes dropped files: its handlers, and its class while files are above it.
export function useDrop(onFiles) {
  const [isOver, setIsOver] = useState(false);
  const onDragOver = (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault(), setIsOver(true);
  };
  const onDrop = (event) => {
    setIsOver(false);
    if (event.dataTransfer.files.length > 0) event.preventDefault(), onFiles(event.dataTransfer.files);
  };
  return { class: isOver ? "over" : "", onDragOver, onDragLeave: () => setIsOver(false), onDrop };
}
