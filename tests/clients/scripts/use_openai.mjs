// The npm openai client. Like cases.py: one JSON line per case, with the error if it had one.
import { strict as assert } from "node:assert";
import { createRequire } from "node:module";

const [url, model, home] = process.argv.slice(2);
const OpenAI = createRequire(`${home}/`)("openai").OpenAI;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "sk-client", maxRetries: 0 });

const greeting = "Hello! Grüße, 你好, 🙂👩‍🚀.";
const hello = [{ role: "user", content: "Say hello." }];
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters } };
const person = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

const cases = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages: hello });
    assert.equal(answer.choices[0].message.content, greeting);
  },
  async stream() {
    let said = "";
    for await (const chunk of await client.chat.completions.create({ model, messages: hello, stream: true }))
      said += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(said, greeting);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "Say hello.", max_tokens: 64 });
    assert.equal(answer.choices[0].text, greeting);
  },
  async tools() {
    const first = (await client.chat.completions.create({ model, messages: question, tools: [tool] })).choices[0];
    const call = first.message.tool_calls[0];
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    assert.equal(first.finish_reason, "tool_calls");
    const told = [...question, first.message, { role: "tool", tool_call_id: call.id, content: "21" }];
    const second = await client.chat.completions.create({ model, messages: told, tools: [tool] });
    assert.equal(second.choices[0].message.content, "It is 21 degrees in Paris.");
  },
  async tools_stream() {
    const final = await client.chat.completions.stream({ model, messages: question, tools: [tool] }).finalChatCompletion();
    assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: "Paris" });
  },
  async json_schema() {
    const answer = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: "How old is Ada?" }],
      response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema: person } },
    });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: "Ada", age: 36 });
  },
  async responses() {
    const answer = await client.responses.create({ model, input: "Say hello." });
    assert.equal(answer.output_text, greeting);
  },
  async responses_stream() {
    let said = "";
    for await (const event of await client.responses.create({ model, input: "Say hello.", stream: true }))
      if (event.type === "response.output_text.delta") said += event.delta;
    assert.equal(said, greeting);
  },
  async errors() {
    const unknown = client.chat.completions.create({ model: "other", messages: hello });
    await assert.rejects(unknown, (error) => error.status === 404 && error.code === "model_not_found");
    const long = [{ role: "user", content: "word ".repeat(5000) }];
    const tooLong = client.chat.completions.create({ model, messages: long, stream: true });
    await assert.rejects(tooLong, (error) => error.code === "context_length_exceeded");
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "sk-wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), (error) => error.status === 401);
  },
};

for (const [name, run] of Object.entries(cases)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = String(raised.stack ?? raised);
  }
  console.log(JSON.stringify({ case: name, error }));
}
