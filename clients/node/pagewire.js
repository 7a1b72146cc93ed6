/**
 * Client of a Pagewire server.
 *
 * Owns: loading the protos, turning failures into PagewireError, ending a call whose reader went
 * away, going on with a stream that broke. Does not know: retries of other calls.
 *
 * Messages are plain objects with the proto's field names in camelCase; enums are their names,
 * 64-bit integers are decimal strings, and an `optional` field that is not set is absent.
 */

import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import { DEFAULT_RESUME, GenerationLog, Outage, pause } from './resume.js';

const PROTO_DIR = fileURLToPath(new URL('../../protos', import.meta.url));

const definitions = protoLoader.loadSync(
  ['pagewire/v1/inference.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'],
  { includeDirs: [PROTO_DIR], longs: String, enums: String, defaults: true },
);
const { InferenceService } = grpc.loadPackageDefinition(definitions).pagewire.v1;

/**
 * @typedef {object} SamplingParams Unset fields take the documented defaults of the proto.
 * @property {number} [n]
 * @property {number} [maxTokens]
 * @property {number} [minTokens]
 * @property {number} [temperature] 0: greedy.
 * @property {number} [topP]
 * @property {number} [topK]
 * @property {number} [minP]
 * @property {string|number} [seed]
 * @property {string[]} [stop]
 * @property {number[]} [stopTokenIds]
 * @property {boolean} [ignoreEos]
 */

/**
 * @typedef {object} GenerateRequest Exactly one of text, tokenIds and chat.
 * @property {string} [requestId]
 * @property {string} [model] Only needed where several models are served.
 * @property {string} [text]
 * @property {{ids: number[]}} [tokenIds]
 * @property {{messages: {role: string, content: string}[]}} [chat]
 * @property {SamplingParams} [sampling]
 * @property {number} [priority]
 * @property {string} [cacheSalt]
 * @property {{seconds?: number, nanos?: number}} [flushInterval]
 */

/**
 * @typedef {object} SequenceOutput
 * @property {number} index Which of the `n` continuations.
 * @property {string} text Text since the previous response.
 * @property {number[]} tokenIds The ids of exactly that text.
 * @property {string} finishReason FINISH_REASON_UNSPECIFIED until the sequence's last news.
 */

/**
 * @typedef {object} GenerateResponse
 * @property {string} requestId Set in the first response.
 * @property {string} [seed] Set in the first response.
 * @property {SequenceOutput[]} outputs
 * @property {?{promptTokens: number, completionTokens: number, cachedTokens: number, replays: number}} usage
 *     Set in the last response.
 */

/**
 * @typedef {object} CallOptions
 * @property {AbortSignal} [signal] Cancels the call, which then throws the signal's reason.
 * @property {number} [timeoutMs] Ends the call with DEADLINE_EXCEEDED after this long.
 */

const CHANNEL_OPTIONS = {
  // A server that comes back is found within a second or two, however long it was away.
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 1_000,
};

// Where http_proxy is set, grpc would ask the proxy for a server on this machine.
const isLoopback = (server) => /^(127\.|localhost:|\[::1\]:)/.test(server);

const NO_SUCH_METHOD = 'Method not found!';
const WRONG_PORT =
  "a gRPC server answers there, but not with the public API. A control plane's worker port does so: " +
  'call its public port, 50051 by default';

/** A failed call. `reason` is stable and for machines; `message` is for people. */
export class PagewireError extends Error {
  /** @param {grpc.ServiceError} error */
  constructor(error) {
    const status = statusDetails(error);
    const isElsewhere = error.code === grpc.status.UNIMPLEMENTED && error.details === NO_SUCH_METHOD;
    const message = isElsewhere ? WRONG_PORT : status?.message || error.details || error.message;
    super(message, { cause: error });
    this.name = 'PagewireError';
    /** The gRPC status code's name, such as INVALID_ARGUMENT. */
    this.code = grpc.status[error.code];
    /** Such as REQUEST_TOO_LONG; empty where the failure did not come from a Pagewire server. */
    this.reason = status?.errorInfo?.reason ?? '';
    /** @type {Record<string, string>} The values and limits that the message names. */
    this.metadata = { ...status?.errorInfo?.metadata };
    /** @type {number|undefined} When trying again makes sense. */
    this.retryAfterMs = status?.retryAfterMs;
  }
}

/** One connection to a server. Calls may run at the same time. */
export class PagewireClient {
  #token;

  /**
   * @param {string} server "host:port"
   * @param {object} [options]
   * @param {grpc.ChannelCredentials} [options.credentials] Plain text when unset.
   * @param {string} [options.token] Says who calls, to a server that asks.
   * @param {grpc.ChannelOptions} [options.channel]
   * @param {import('./resume.js').ResumePolicy|false} [options.resume] How streams go on when the
   *     server goes away in their midst; false: they fail.
   */
  constructor(
    server,
    { credentials = grpc.credentials.createInsecure(), token, channel = {}, resume = {} } = {},
  ) {
    const url = /^(https?|grpcs?):\/\/([^/]*)/i.exec(server);
    if (url) throw new TypeError(`a server is named as host:port, not as a URL: ${url[2]}`);
    this.server = server;
    this.#token = token;
    this.resumePolicy = resume && { ...DEFAULT_RESUME, ...resume };
    /** The generated stub, for calls that have no method here. */
    this.stub = new InferenceService(server, credentials, {
      ...CHANNEL_OPTIONS,
      ...(isLoopback(server) && { 'grpc.enable_http_proxy': 0 }),
      ...channel,
    });
  }

  /**
   * Waits for the connection, for a server that may just be starting. Calls don't need it.
   *
   * @param {{timeoutMs?: number}} [options]
   * @returns {Promise<void>}
   */
  waitForReady({ timeoutMs = 30_000 } = {}) {
    return new Promise((resolve, reject) => {
      this.stub.waitForReady(Date.now() + timeoutMs, (error) => {
        if (error) reject(new Error(`${this.server} does not answer`, { cause: error }));
        else resolve();
      });
    });
  }

  /**
   * Streams the continuations of one prompt. The call starts with the first `next()`; leaving the
   * loop early cancels it, and its blocks on the server are free within a step. A stream that breaks
   * goes on where it was, as `resume` of the constructor says.
   *
   * @param {GenerateRequest} request
   * @param {CallOptions} [options]
   * @returns {AsyncGenerator<GenerateResponse, void, void>}
   * @throws {PagewireError} The call failed.
   * @throws {TypeError} The request has a field that the proto does not know.
   */
  async *generate(request, { signal, timeoutMs } = {}) {
    signal?.throwIfAborted();
    checkFields('GenerateRequest', request);
    const log = new GenerationLog(request);
    const outage = new Outage(this.resumePolicy, timeoutMs);
    for (;;) {
      try {
        for await (const response of this.#attempt(log.nextRequest(), signal, outage)) {
          // Of a later attempt, id and seed are no news.
          const isNews = !log.hasBegun || response.outputs.length || response.usage;
          log.add(response);
          if (response.outputs.length) outage.over();
          if (isNews) yield response;
        }
        return;
      } catch (error) {
        const pauseMs = error instanceof PagewireError ? outage.pauseMs(error, log) : undefined;
        if (pauseMs === undefined) throw error;
        await pause(pauseMs, signal);
      }
    }
  }

  async *#attempt(request, signal, outage) {
    const call = this.stub.generate(request, this.#metadata(), outage.callOptions());
    // grpc-js emits 'error' for the cancellation below, when nobody iterates any more; without a
    // listener that would end the process.
    call.on('error', () => {});
    const cancel = () => call.cancel();
    signal?.addEventListener('abort', cancel, { once: true });
    try {
      yield* call;
    } catch (error) {
      throw failure(error, signal);
    } finally {
      signal?.removeEventListener('abort', cancel);
      call.cancel();
    }
  }

  /**
   * @param {{model?: string, text?: string, chat?: object, addSpecialTokens?: boolean}} request
   * @param {CallOptions} [options]
   * @returns {Promise<{tokenIds: number[], maxModelLen: number}>}
   */
  async tokenize(request, options) {
    checkFields('TokenizeRequest', request);
    return this.#unary('tokenize', request, options);
  }

  /**
   * @param {{model?: string, tokenIds: number[], skipSpecialTokens?: boolean}} request
   * @param {CallOptions} [options]
   * @returns {Promise<{text: string}>}
   */
  async detokenize(request, options) {
    checkFields('DetokenizeRequest', request);
    return this.#unary('detokenize', request, options);
  }

  /**
   * @param {CallOptions} [options]
   * @returns {Promise<{models: {name: string, fingerprint: string, maxModelLen: number,
   *     vocabSize: number, readyReplicas: number, hasChatTemplate: boolean}[]}>}
   */
  listModels(options) {
    return this.#unary('listModels', {}, options);
  }

  /**
   * @param {CallOptions} [options]
   * @returns {Promise<{replicas: {replicaId: string, usableBlocks: number, freeBlocks: number,
   *     numRequestsRunning: number, numRequestsWaiting: number}[], numRequestsUnplaced: number,
   *     prefixStore: string}>}
   */
  getStats(options) {
    return this.#unary('getStats', {}, options);
  }

  /** Ends the connection; calls that run are cut off. */
  close() {
    this.stub.close();
  }

  #metadata() {
    const metadata = new grpc.Metadata();
    if (this.#token !== undefined) metadata.set('authorization', `Bearer ${this.#token}`);
    return metadata;
  }

  #unary(method, request, { signal, timeoutMs } = {}) {
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      const cancel = () => call.cancel();
      const done = (error, response) => {
        signal?.removeEventListener('abort', cancel);
        if (error) reject(failure(error, signal));
        else resolve(response);
      };
      const call = this.stub[method](request, this.#metadata(), callOptions(timeoutMs), done);
      signal?.addEventListener('abort', cancel, { once: true });
    });
  }
}

/**
 * A plain object as a google.protobuf.Struct, for chat.tools, toolCalls and templateKwargs.
 *
 * @param {Record<string, unknown>} object
 */
export function toStruct(object) {
  return { fields: Object.fromEntries(Object.entries(object).map(([k, v]) => [k, toValue(v)])) };
}

function toValue(value) {
  if (value === null || value === undefined) return { nullValue: 'NULL_VALUE' };
  if (Array.isArray(value)) return { listValue: { values: value.map(toValue) } };
  switch (typeof value) {
    case 'object': return { structValue: toStruct(value) };
    case 'number': return { numberValue: value };
    case 'boolean': return { boolValue: value };
    default: return { stringValue: String(value) };
  }
}

/** The loader drops what it does not know: a misspelt maxTokens would silently have no effect. */
function checkFields(type, message) {
  const fields = definitions[`pagewire.v1.${type}`].type.field;
  for (const [name, value] of Object.entries(message)) {
    const field = fields.find((candidate) => candidate.name === name);
    if (!field) throw new TypeError(`${type} has no field ${name} (names are in camelCase)`);
    if (definitions[`pagewire.v1.${field.typeName}`]?.type.field && value) {
      for (const part of [value].flat()) checkFields(field.typeName, part);
    }
  }
}

function callOptions(timeoutMs) {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}

function failure(error, signal) {
  if (signal?.aborted && error.code === grpc.status.CANCELLED) return signal.reason;
  // What is no status of a call is a mistake in the caller's code, and stays what it is.
  return error.metadata instanceof grpc.Metadata ? new PagewireError(error) : error;
}

/** Reads the google.rpc.Status that a Pagewire server attaches to every failed call. */
function statusDetails(error) {
  const [bytes] = error.metadata.get('grpc-status-details-bin');
  if (!bytes) return undefined;
  const status = decode('google.rpc.Status', bytes);
  const detail = (type) => {
    const any = status.details.find((entry) => entry.type_url.endsWith(`/${type}`));
    return any && decode(type, any.value);
  };
  const delay = detail('google.rpc.RetryInfo')?.retryDelay;
  return {
    message: status.message,
    errorInfo: detail('google.rpc.ErrorInfo'),
    retryAfterMs: delay ? Number(delay.seconds) * 1000 + delay.nanos / 1e6 : undefined,
  };
}

function decode(type, bytes) {
  return definitions[type].deserialize(bytes);
}
