// node embed.mjs BASE_URL MODEL INPUT_AS_JSON [OPTIONS_AS_JSON]: prints vectors, or the error, as JSON.
import OpenAI from "openai";

const [baseURL, model, input, options = "{}"] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
try {
  const answer = await client.embeddings.create({ model, input: JSON.parse(input), ...JSON.parse(options) });
  console.log(JSON.stringify({ vectors: answer.data.map((entry) => entry.embedding), usage: answer.usage }));
} catch (error) {
  console.log(JSON.stringify({ name: error.constructor.name, status: error.status, param: error.param }));
}
