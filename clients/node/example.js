/**
 * Streams an answer, then starts a long one, cancels it after a few tokens and shows that its blocks
 * are free again. Ends with status 1 if any of it fails.
 *
 *   node example.js [--server HOST:PORT] [--wait-s SECONDS] [PROMPT]
 *
 * The server's address is also read from PAGEWIRE_SERVER; 127.0.0.1:50051 if neither is given. It is
 * waited for, 5 seconds unless told otherwise, since it may just be starting.
 */

import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { PagewireClient, PagewireError } from './pagewire.js';

const TOKENS_BEFORE_CANCEL = 5;
const CALL_TIMEOUT_MS = 120_000;
const FREE_AGAIN_LIMIT_MS = 10_000;

const { values, positionals } = parseArgs({
  options: {
    server: { type: 'string', default: process.env.PAGEWIRE_SERVER || '127.0.0.1:50051' },
    'wait-s': { type: 'string', default: '5' },
  },
  allowPositionals: true,
});
let client;
const controller = new AbortController();

function prompt(model, text) {
  const form = model.hasChatTemplate ? { chat: { messages: [{ role: 'user', content: text }] } } : { text };
  return { model: model.name, ...form };
}

async function blocks() {
  const { replicas } = await client.getStats({ timeoutMs: 10_000 });
  const sum = (field) => replicas.reduce((total, replica) => total + replica[field], 0);
  return { free: sum('freeBlocks'), usable: sum('usableBlocks'), running: sum('numRequestsRunning') };
}

async function streamAnAnswer(model) {
  const request = {
    ...prompt(model, positionals[0] ?? 'What is the capital of France?'),
    sampling: { temperature: 0, maxTokens: 48 },
  };
  let usage;
  for await (const response of client.generate(request, { timeoutMs: CALL_TIMEOUT_MS })) {
    for (const output of response.outputs) process.stdout.write(output.text);
    usage = response.usage ?? usage;
  }
  if (!usage?.completionTokens) throw new Error('the answer was empty');
  console.log(`\n[${usage.promptTokens} prompt tokens, ${usage.completionTokens} output tokens]`);
}

async function cancelALongOne(model) {
  const before = await blocks();
  const request = {
    ...prompt(model, 'Count from one to a thousand.'),
    sampling: { temperature: 0, maxTokens: 500, ignoreEos: true },
  };
  let numTokens = 0;
  try {
    for await (const response of client.generate(request, {
      signal: controller.signal,
      timeoutMs: CALL_TIMEOUT_MS,
    })) {
      for (const output of response.outputs) numTokens += output.tokenIds.length;
      if (numTokens >= TOKENS_BEFORE_CANCEL && !controller.signal.aborted) {
        const { free, usable } = await blocks();
        console.log(`cancelling after ${numTokens} tokens; ${free} of ${usable} blocks are free`);
        controller.abort();
      }
    }
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
  }
  if (!controller.signal.aborted) throw new Error(`it ended by itself after ${numTokens} tokens`);
  const deadline = Date.now() + FREE_AGAIN_LIMIT_MS;
  for (;;) {
    const { free, usable, running } = await blocks();
    if (free >= before.free) {
      console.log(`cancelled; ${free} of ${usable} blocks are free, ${running} requests run`);
      return;
    }
    if (Date.now() > deadline) {
      throw new Error(`${free} blocks are free, but ${before.free} were before the request`);
    }
    await sleep(20);
  }
}

try {
  client = new PagewireClient(values.server);
  await client.waitForReady({ timeoutMs: Number(values['wait-s']) * 1000 });
  const { models } = await client.listModels({ timeoutMs: 10_000 });
  if (models.length === 0) throw new Error(`${values.server} serves no model`);
  console.log(`${values.server} serves ${models.map((model) => model.name).join(', ')}`);
  const model = models[0];
  await streamAnAnswer(model);
  await cancelALongOne(model);
} catch (error) {
  if (error instanceof PagewireError) {
    console.error(`${error.code} ${error.reason}: ${error.message}`, error.metadata);
  } else {
    console.error(error.message);
  }
  process.exitCode = 1;
} finally {
  client?.close();
}
