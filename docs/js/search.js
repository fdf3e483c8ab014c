// The search reads a leading "-" as "without" and finds nothing for "--sequence-splits": all words of a flag are required.
const wordsOf = (flag) => flag.split(/-+/).filter(Boolean).map((word) => `+${word}`).join(" ");
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = typeof message?.data === "string";
  const data = isQuery && message.data.replace(/(?<!\S)-\S+/g, wordsOf);
  return post.call(this, isQuery ? { ...message, data } : message, ...rest);
};
