// Python beside the page: answers settings with panels, one question at a time.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const playground = loadPyodide().then(async (pyodide) => {
  const archive = await fetch(new URL("schedule.zip", import.meta.url));
  pyodide.unpackArchive(await archive.arrayBuffer(), "zip");
  return pyodide.pyimport("megatron.seq1f1b.report.playground");
});

onmessage = async ({ data }) => postMessage((await playground).answer(data));
