// The search reads "-" as "without", and may find nothing for "--sequence-splits" or "ZB-V": their words are required,
// but for single letters.
const wordsOf = (name) => name.split(/-+/).filter((word) => word.length > 1).map((word) => `+${word}`).join(" ");
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = typeof message?.data === "string";
  const data = isQuery && message.data.replace(/\S*-\S+/g, wordsOf);
  return post.call(this, isQuery ? { ...message, data } : message, ...rest);
};
