"""The gate of a model: checks that chunks are exact inside vLLM, and that questions are answered as well as
without chunks.

```text
  questions ──► chat ──► check ──► verdict       notes and questions as prompts in parts, with every setting
                           │
              reference ◄──┼──► local            transformers; vLLM in this process
                           ▼
                        compare                  answers, token by token
```
"""
