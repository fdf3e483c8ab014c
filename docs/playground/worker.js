// Python beside the page: answers settings with panels, one question at a time.
const playground = load();

async function load() {
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const pyodide = await loadPyodide();
  const archive = await fetch(new URL("schedule.zip", import.meta.url));
  if (!archive.ok) throw new Error(`schedule.zip: ${archive.status}`);
  pyodide.unpackArchive(await archive.arrayBuffer(), "zip");
  return pyodide.pyimport("playground");
}

onmessage = async ({ data }) => {
  try {
    postMessage((await playground).answer(data));
  } catch (error) {
    const reason = String(error.message ?? error).trim().split("\n").at(-1);
    postMessage(JSON.stringify({ error: `Python did not load or stopped: ${reason}. Reload the page to try again.` }));
  }
};
