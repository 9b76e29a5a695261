// Explanations of the stages of a request, one sentence or two each.

export const STAGES = {
  client_network: "The request travels from the client to the router, or waits for the router's process. Both clocks must agree.",
  router_receive: "The router reads and parses the body of the request.",
  router_queue: "The request waits in the router for admission. The router's --max-running-requests is reached.",
  router_choose: "The router chooses the pair of workers by its policy. If a role has no worker, the request waits for one to return.",
  router_dispatch: "The router encodes the bodies for the workers and writes them.",
  request_network: "The request travels from the router to the worker.",
  failed_attempt: "An attempt on a worker failed. The router repeated the request, on another worker if there was one.",
  unreported: "The attempt reached the first token and failed later. The report of its worker was lost, so the stages of this time are unknown.",
  response_network: "The answer travels from the worker to the router.",
  router_forward: "The router passes the answer on to the client.",
  tokenize: "The worker checks the request and converts its text to tokens.",
  to_scheduler: "The request travels from the worker's front end to its scheduler.",
  to_front_end: "The tokens travel from the worker's scheduler to its front end.",
  detokenize: "The worker converts the new tokens to text and writes the frame.",
  grammar: "The request waits for the compiled grammar of its structured output.",
  bootstrap: "The prefill worker waits until the decode worker has reserved pages for the KV cache.",
  waiting: "The request waits in the queue for a place in a step and for KV pages. If this is long, add workers of this role.",
  prefill_chunk: "The worker computes a part of the prompt in one step.",
  between_steps: "The request is in the running batch, but in no step, because the scheduler is busy or the step contains other requests.",
  transfer: "A part of the KV cache moves to the decode worker. Exposed parts delay the first token, overlapped parts do not.",
  transfer_done: "The prefill worker waits for the proof that the last byte has arrived.",
  handshake: "The decode worker finds the prefill worker, and compares its layout with its own. Later requests of the pair take less time here.",
  prealloc: "The request waits for pages of the decode worker's KV pool. If this is long, enlarge the pool or add decode workers.",
  kv_wait: "The pages are reserved. The decode worker waits for the prefill and the KV transfer.",
  metadata: "The decode worker reads and checks the first token and the figures of the prefill.",
  prebuilt: "The KV cache is complete. The request waits for a place in the running batch.",
  decode: "The request is in the running batch and receives one token or more per step.",
  retracted: "The KV pool was full, so the request released its pages. It waits to resume.",
};

export const UNKNOWN = "This release of the page has no explanation for this stage.";
