// Drives the page of a running server in a headless browser, over its debugging protocol.
//
// Usage: page.mjs URL SCREENSHOT (see scripts/page_check.sh). Needs chromium (or $CHROMIUM) and node 20 or newer, with --experimental-websocket.
import { spawn } from "node:child_process";
import { mkdtempSync, writeFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, screenshot] = process.argv.slice(2);
const profile = mkdtempSync(join(tmpdir(), "page-check-"));
const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
  `--user-data-dir=${profile}`, "about:blank"];
const browser = spawn(process.env.CHROMIUM ?? "chromium", flags, { stdio: ["ignore", "ignore", "pipe"] });
const complain = message => { throw new Error(message); };

const socket = await new Promise((resolve, reject) => {
  let words = "";
  browser.stderr.on("data", data => {
    words += data;
    const found = words.match(/DevTools listening on (ws:\S+)/);
    if (found) resolve(new WebSocket(found[1]));
  });
  browser.on("exit", () => reject(new Error("the browser has ended: " + words)));
});
await new Promise(resolve => socket.addEventListener("open", resolve));
let count = 0;
const waiting = new Map();
const faults = [];
socket.addEventListener("message", ({ data }) => {
  const message = JSON.parse(data);
  if (message.id) { waiting.get(message.id)(message); waiting.delete(message.id); return; }
  const { method, params } = message;
  if (method === "Runtime.exceptionThrown") faults.push(params.exceptionDetails.exception?.description ?? "exception");
  if (method === "Runtime.consoleAPICalled" && params.type === "error") faults.push(JSON.stringify(params.args));
  if (method === "Log.entryAdded" && params.entry.level === "error") faults.push(params.entry.text + " " + params.entry.url);
  if (method === "Network.requestWillBeSent" && !params.request.url.startsWith(url) && !params.request.url.startsWith("data:"))
    faults.push("a request to " + params.request.url);
});
const send = (method, params = {}, sessionId) => new Promise((resolve, reject) => {
  const id = ++count;
  waiting.set(id, message => message.error ? reject(new Error(method + ": " + message.error.message)) : resolve(message.result));
  socket.send(JSON.stringify({ id, method, params, sessionId }));
});

try {
  const { targetId } = await send("Target.createTarget", { url: "about:blank" });
  const { sessionId } = await send("Target.attachToTarget", { targetId, flatten: true });
  const page = (method, params) => send(method, params, sessionId);
  for (const part of ["Page", "Runtime", "Log", "Network"]) await page(part + ".enable");
  // A phone.
  await page("Emulation.setDeviceMetricsOverride", { width: 390, height: 844, deviceScaleFactor: 2, mobile: true });
  const run = async expression => {
    const { result, exceptionDetails } = await page("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) complain(exceptionDetails.exception?.description ?? expression);
    return result.value;
  };
  const until = async (expression, what) => {
    for (let i = 0; i < 600; i++) {
      if (await run(expression)) return;
      await new Promise(resolve => setTimeout(resolve, 100));
    }
    complain("waited in vain: " + what);
  };
  await page("Page.navigate", { url });
  await until("document.readyState === 'complete' && !!document.getElementById('ask')", "the page");
  await run(`document.getElementById("tokens").value = 80`);
  await until("document.getElementById('about').textContent.includes('schedule')", "the description");
  const ask = async text => {
    const before = await run("document.querySelectorAll('.facts').length");
    await run(`document.getElementById("text").value = ${JSON.stringify(text)}; document.getElementById("ask").requestSubmit()`);
    await until(`document.querySelectorAll('.facts').length > ${before}`, "an answer");
  };
  await ask("Write the words red, green, blue, red, green, blue, red, green, blue.");
  await ask("Tell me about the sea, please.");
  if (await run("document.querySelectorAll('.facts.error').length")) complain(await run("document.querySelector('.facts.error').textContent"));
  if (!await run("document.querySelectorAll('.accepted').length")) complain("no accepted token in colour");
  if (!await run("document.querySelectorAll('.rejected').length")) complain("no rejected token in colour");
  await until("/^[0-9.]+$/.test(document.getElementById('tau').textContent)", "tau");
  await until("document.querySelectorAll('#chart rect').length > 1", "the chart");
  const overflow = await run("document.documentElement.scrollWidth - document.documentElement.clientWidth");
  if (overflow > 0) complain(`the page is ${overflow} pixels too wide for a phone`);
  const { data } = await page("Page.captureScreenshot", { format: "png" });
  writeFileSync(screenshot, Buffer.from(data, "base64"));
  await page("Emulation.setDeviceMetricsOverride", { width: 1280, height: 860, deviceScaleFactor: 1, mobile: false });
  const wide = await page("Page.captureScreenshot", { format: "png" });
  writeFileSync(screenshot.replace(/\.png$/, "-wide.png"), Buffer.from(wide.data, "base64"));
  // Without drafts, the text alone; and a stop in the middle.
  await run("document.getElementById('drafts').click()");
  if (!await run("getComputedStyle(document.querySelector('.rejected')).display === 'none'")) complain("drafts stay");
  await run("document.getElementById('clear').click()");
  await run(`document.getElementById("tokens").value = 900;
    document.getElementById("text").value = "Write a long story about a dragon and a village, in many chapters.";
    document.getElementById("ask").requestSubmit()`);
  await until("document.querySelector('.turn.model')?.textContent.length > 10", "the story");
  await run("document.getElementById('send').click()");
  await until("[...document.querySelectorAll('.facts')].pop().textContent === 'stopped'", "the stop");
  if (faults.length) complain("the browser complains: " + faults.join("; "));
  console.log("the page works");
} finally {
  browser.kill();
  await new Promise(resolve => browser.exitCode === null ? browser.on("exit", resolve) : resolve());
  try {
    rmSync(profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 200 });
  } catch (error) {
    // A child of the browser may outlive it for a while; what it leaves is in the folder for temporary files.
    console.log("left behind: " + error.message);
  }
}
