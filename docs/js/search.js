// The search reads a leading "-" as "without" and fails at "--sequence-splits", so words are passed on without operators.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const words = message?.query?.replace(/[-+~^:*]+/g, " ").trim();
  return post.call(this, words ? { ...message, query: words } : message, ...rest);
};
