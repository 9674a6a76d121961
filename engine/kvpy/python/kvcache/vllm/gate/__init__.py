"""The gate of a model: chunks are exact inside vLLM, and questions are answered as well as without them.

```text
  questions ──► chat ──► check ──► verdict       notes and questions, as prompts in parts, asked in every way
                           │
              reference ◄──┼──► local            transformers, and a vLLM in this process
                           ▼
                        compare                  answers, token by token
```
"""
