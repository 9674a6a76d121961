"""Goldens for GGUF files, made by llama.cpp: tokens of texts, and greedy answers of small models.

Writes engine/kvmodel/tests/goldens/gguf_tokenizers.json: the IDs that llama.cpp gives each text in TEXTS, for each
pre-tokenizer in PRE and for a vocabulary with scores, and whether prompts begin with a token of their own. A name whose
IDs are those of an earlier name has that name in their place. The vocabulary is merged across words, so that a text that
is split elsewhere has other tokens. Writes engine/kvmodel/tests/goldens/gguf/*.gguf as well: models of 1 layer with
random weights, whose greedy answers are in the same JSON.

    pip install xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6 tokenizers==0.23.3
    python proof/goldens/gguf/llama_cpp.py
"""

import json
import pathlib
import tempfile
import urllib.request

import gguf
import numpy as np
import tokenizers
import xllamacpp

OUT = pathlib.Path(__file__).parents[3] / "engine/kvmodel/tests/goldens"
WIDTH, HEADS, INNER = 32, 2, 64
# Fields of YaRN, each in a file of its own.
YARN = {"yarn_beta_fast": 2.0, "yarn_beta_slow": 0.125, "yarn_ext_factor": 1.0}
# Every name that the reader accepts.
PRE = [
    "default", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
    "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "jina-v1-en", "jina-v2-code",
    "roberta-bpe", "smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b", "mellum2",
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    "smaug-bpe", "dbrx", "chatglm-bpe", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2",
    "hunyuan", "solar-open", "grok-2", "qwen35", "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4",
    "deepseek-coder", "falcon", "tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "bailingmoe",
    "bailingmoe2", "llada-moe", "seed-coder", "poro-chat", "bloom", "gpt3-finnish", "viking", "superbpe", "glm4",
    "glm5", "minicpm5", "granite-embed-multi-97m", "deepseek-llm", "afmoe", "exaone-moe", "jais-2", "chameleon",
    "ufakzeka",
]
TEXTS = [
    "Hello wide world, it's 12345 and they'll SAY'RE",
    "  two  spaces\n\n\nand lines \r\n tabs\t\tend  ",
    "x=1;y+=22 // a/b_c (d) [e] {f} <g> $h ^i ~j |k `l`",
    "Grüße aus Köln, ÀÉÎõü ßẞ ǅ 1234567 890",
    "你好，世界！これはテスト。가나다 ٣٤٥ ١",
    "e\u0301te\u0301 a\u0308 हिन्दी ไทย",
    "CamelCaseWords HTTPServer iPhone don't DON'T I'M we've",
    "!!! ... --- ??!! 3.14 1,000,000 50% #tag @user",
    "😀😃 👩‍👩‍👧 end.\n",
    "a",
    " a",
    "aa  bb   cc    dd\u00a0ee\u3000ff",
    "x     y         z\t\t\t\t\tw          \n",
    "中文a，「中」a's 中 中１２中漢字かなカナ한 中ABC中abc中 hello中 ㅋㅋ 、。",
    "12 123 1234 12345 123456 1234567 ab1234cd ١٢٣٤٥",
    "'Llama 'reX 'sabc it'S'd 4 a\u0301b1c22d333e4444",
    "अ आ b c सत्\u200dय ab \n\n   ",
    "<sentinel:12> IMGIMGABZ (a) [b]    c",
]


def vocabulary(texts, prefix):
    """Returns tokens and merges that are trained on texts without splitting them."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    if prefix is None:
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        texts = [t for t in texts for _ in range(2)]
    else:
        alphabet, texts = [], [prefix + t.replace(" ", prefix) for t in texts for _ in range(2)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=620, min_frequency=2, initial_alphabet=sorted(alphabet), show_progress=False, max_token_length=4
    )
    model.train_from_iterator(texts, trainer)
    state = json.loads(model.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return tokens, [" ".join(pair) for pair in state["merges"]]


def write(path, rng, tokenizer, kind=gguf.GGMLQuantizationType.F16):
    """Writes a model with random weights and the fields that `tokenizer` adds."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    count = tokenizer(writer)
    shapes = {"token_embd": (count, WIDTH), "output": (count, WIDTH)}
    shapes |= {f"blk.0.attn_{p}": (WIDTH, WIDTH) for p in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH), "blk.0.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        if kind == gguf.GGMLQuantizationType.IQ4_NL and name.startswith("blk"):
            blocks = rng.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
            scales = rng.uniform(0.001, 0.004, (shape[0], shape[1] // 32, 1)).astype(np.float16)
            blocks[:, :, :2] = scales.view(np.uint8)
            writer.add_tensor(f"{name}.weight", blocks.reshape(shape[0], -1), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bytes_of(pre, tokens, merges, begins=False, rope=None):
    def add(writer):
        for name, value in (rope or {}).items():
            field = f"llama.rope.{name}"
            if isinstance(value, float):
                writer.add_float32(field, value)
            elif isinstance(value, int):
                writer.add_uint32(field, value)
            else:
                writer.add_string(field, value)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        if begins is not None:
            writer.add_add_bos_token(begins)
        return len(tokens)

    return add


def scored(pieces, scores, kinds):
    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(pieces)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        return len(pieces)

    return add


class Llama:
    """llama.cpp's server with one model, and parameters that replace fields of the file."""

    def __init__(self, path, **parameters):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
        for name, value in parameters.items():
            setattr(params, name, value)
        self.server = xllamacpp.Server(params)

    def post(self, place, body):
        request = urllib.request.Request(
            self.server.listening_address + place, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.loads(urllib.request.urlopen(request).read())

    def tokens(self, text, special=False):
        return self.post("/tokenize", {"content": text, "add_special": special, "parse_special": False})["tokens"]

    def answer(self, text):
        body = {"prompt": text, "n_predict": 12, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        return self.post("/completion", body)["tokens"]


def main():
    tokens, merges = vocabulary(TEXTS, None)
    # A token that no merge makes.
    tokens.append("Hello")
    goldens = {"header": f"made by proof/goldens/gguf/llama_cpp.py with xllamacpp {xllamacpp.__version__}"}
    goldens |= {"texts": TEXTS, "tokens": tokens, "merges": merges, "ids": {}, "begins": {}, "answers": {}}
    pieces, _ = vocabulary(TEXTS, "▁")
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    goldens["scored"] = {"pieces": pieces, "scores": scores, "kinds": kinds}
    (OUT / "gguf").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE:
            path = pathlib.Path(folder) / f"{pre}.gguf"
            write(path, np.random.default_rng(0), bytes_of(pre, tokens, merges, begins=None))
            llama = Llama(path)
            ids = [llama.tokens(text) for text in TEXTS]
            earlier = (name for name, known in goldens["ids"].items() if known == ids)
            goldens["ids"][pre] = next(earlier, ids)
            goldens["begins"][pre] = llama.tokens("a", special=True) != llama.tokens("a")
    models = {
        "scores": (scored(pieces, scores, kinds), gguf.GGMLQuantizationType.F16),
        "tekken": (bytes_of("tekken", tokens, merges), gguf.GGMLQuantizationType.F16),
        "qwen35": (bytes_of("qwen35", tokens, merges), gguf.GGMLQuantizationType.F16),
        "iq4_nl": (bytes_of("llama-v3", tokens, merges), gguf.GGMLQuantizationType.IQ4_NL),
        "linear": (bytes_of("gpt-2", tokens, merges, rope={"scaling.factor": 8.0}), gguf.GGMLQuantizationType.F16),
        "scale_linear": (bytes_of("gpt-2", tokens, merges, rope={"scale_linear": 8.0}), gguf.GGMLQuantizationType.F16),
    }
    # A part of the vocabulary is enough, and makes small files.
    few = [merge for merge in merges if set(merge.split(" ") + [merge.replace(" ", "")]) <= set(tokens[:272])]
    yarn = {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.original_context_length": 64}
    for name, more in {
        "yarn": {},
        "yarn_attn_factor": {"scaling.attn_factor": 1.75},
        "yarn_yarn_attn_factor": {"scaling.yarn_attn_factor": 1.75},
    }.items():
        kind = gguf.GGMLQuantizationType.F16
        models[name] = (bytes_of("gpt-2", tokens[:272], few, rope={**yarn, **more}), kind)
    # llama.cpp reads these fields for architectures such as grok only, and takes them from its parameters otherwise.
    parameters = {name: {name: value} for name, value in YARN.items()}
    for name, value in YARN.items():
        rope = {**yarn, f"scaling.{name}": value}
        models[name] = (bytes_of("gpt-2", tokens[:272], few, rope=rope), gguf.GGMLQuantizationType.F16)
    for name, (tokenizer, kind) in models.items():
        path = OUT / "gguf" / f"{name}.gguf"
        # With this seed, no two tokens are almost equally likely. llama.cpp rounds activations to eight bits if weights
        # are IQ4_NL, which would then choose the other one.
        write(path, np.random.default_rng(47), tokenizer, kind)
        llama = Llama(path, **parameters.get(name, {}))
        # A long text shows how the rotary embedding is scaled.
        texts = [TEXTS[0] * 4] if name.startswith(("linear", "scale_linear", "yarn")) else TEXTS[:3]
        goldens["answers"][name] = [{"text": text, "tokens": llama.answer(text)} for text in texts]
        if name == "scores":
            goldens["scored"]["ids"] = [llama.tokens(text) for text in TEXTS]
            goldens["scored"]["begun"] = llama.tokens(TEXTS[0], special=True)
    text = json.dumps(goldens, ensure_ascii=False)
    (OUT / "gguf_tokenizers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
