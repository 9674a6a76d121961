//! Calls of tools in a model's answers: found in the text, or bound to the tools by a grammar.
//!
//! ```text
//!  template ─► ToolCallFormat ─┬─► ToolCallParser: text, piece by piece ─► text and calls
//!                              └─► ForcedCalls: a grammar of calls alone
//! ```
//!
//! Each family of models writes calls in a form of its own, which its chat template shows:
//!
//! | family | form |
//! |---|---|
//! | Qwen 2, 2.5, 3, Hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several times |
//! | Mistral | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, later `[TOOL_CALLS]name[ARGS]{…}` |
//! | DeepSeek-V3 | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the arguments in a block of code; in V3.1 name and arguments alone |
//! | Llama 3 | `{"name": …, "parameters": {…}}`, after `<\|python_tag\|>` or at the beginning |
//! | others, Gemma 3 | the same JSON, or a block of code with it, at the beginning |

mod call;
mod forced;
mod format;
mod parser;
mod region;
mod scanner;

pub use call::ToolCall;
pub use forced::ForcedCalls;
pub use format::ToolCallFormat;
pub use parser::{AnswerPart, ToolCallParser};
