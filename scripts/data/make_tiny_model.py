"""Write a tiny model with random weights and its own tokenizer, for tests: nothing is downloaded.

Two layers, hidden size 128, two heads of 64 (the smallest head that vLLM runs on a CPU), about 512 tokens. The weights
are drawn wide enough for the next-token distribution to depend on the context: neither flat nor stuck on one token.

    python scripts/data/make_tiny_model.py --out DIR [--arch llama|qwen2|qwen3]
"""

import argparse
import random
from pathlib import Path

ARCHS = ("llama", "qwen2", "qwen3")
# Qwen2Tokenizer, which transformers loads for arch qwen2, adds <|endoftext|> where it is missing
PAD = "<|endoftext|>"
BOS = "<|im_start|>"
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PEOPLE = "Anna, Tom, the teacher, a farmer, my neighbour, the old doctor, Maria, every student".split(", ")
VERBS = "buys, finds, sells, counts, gives away, carries, keeps, paints, sharpens".split(", ")
THINGS = "apples, red balls, books, small stones, tickets, green bottles, letters, chairs, pencils".split(", ")
PLACES = "at the market, in the garden, near the river, at school, on the train, before lunch".split(", ")


def make_text(n_lines: int = 400) -> list[str]:
    """Lines of English-like text with numbers, always the same ones, to train the tokenizer on."""
    rng = random.Random(0)
    lines = []
    for _ in range(n_lines):
        a = rng.randrange(100)
        b = rng.randrange(100)
        person = rng.choice(PEOPLE)
        verb = rng.choice(VERBS)
        thing = rng.choice(THINGS)
        place = rng.choice(PLACES)
        sentences = [
            f"What is {a} + {b}? The answer is {a + b}.",
            f"Yesterday {person} {verb} {a} {thing} {place}, and then {b} more. How many are there?",
            f"{person.capitalize()} {verb} {a} {thing} {place}.",
            f"Let us think step by step: {a} times {b} equals {a * b}. The final answer is \\boxed{{{a * b}}}.",
            f"Please explain how {person} could have known, without looking, that {b} is less than {a + b}.",
            f"user\nGive only the number.\nassistant\n{a}",
        ]
        lines.append(rng.choice(sentences))
    return lines


def make_tokenizer(vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: there is no unknown token
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_text(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    out: str | Path,
    arch: str = "llama",
    tied: bool = True,
    seed: int = 0,
    layers: int = 2,
    vocab: int = 512,
    hidden: int = 128,
    deviation: float = 0.1,
) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    out = Path(out)
    tokenizer = make_tokenizer(vocab)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(
        arch,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=deviation,
        tie_word_embeddings=tied,
        dtype=torch.float32,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they were
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", choices=ARCHS, default="llama")
    args = parser.parse_args()
    print(f"wrote {make_tiny_model(args.out, args.arch)}")


if __name__ == "__main__":
    main()
