//! Compares `ascend.h` with CANN's headers: generates a C++ file of static assertions on all values, layouts
//! and prototypes.
//!
//! Names that the headers lack are skipped and counted, because headers that are distributed with other
//! software are trimmed.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Headers that include all other headers, except the operators' headers.
const HEADERS: [&str; 3] = ["acl/acl.h", "hccl/hccl.h", "aclnn/acl_meta.h"];

/// The names that `ascend.h` declares.
#[derive(Debug, Default)]
struct Facts {
    /// Names of enumerators.
    values: Vec<String>,
    /// Names of functions.
    functions: Vec<String>,
    /// Names of structs with their fields.
    structs: Vec<(String, Vec<String>)>,
}

impl Facts {
    /// Reads the declarations in the header.
    fn of(page: &str) -> Self {
        let page = &statements(page);
        let mut facts = Self::default();
        let mut fields = None;
        for statement in page.split_inclusive([';', '{', '}', ',', ')']) {
            if let Some((name, _)) = statement.split_once(" = ") {
                facts.values.extend(name.split_whitespace().last().map(str::to_owned));
            }
        }
        for statement in page.split_inclusive(';') {
            let text = statement.trim();
            if let Some((_, inside)) =
                text.split_once("typedef struct").filter(|(_, rest)| rest.contains('{'))
            {
                fields = inside.split_once('{').map(|(name, first)| {
                    (name.trim().to_owned(), field(first).into_iter().collect::<Vec<_>>())
                });
            } else if text.starts_with('}') {
                facts.structs.extend(fields.take());
            } else if let Some((_, fields)) = &mut fields {
                fields.extend(field(text));
            } else if let Some((head, _)) = text.split_once('(').filter(|_| !text.starts_with("typedef")) {
                facts.function(head, text);
            }
        }
        facts
    }

    fn function(&mut self, head: &str, text: &str) {
        match text.strip_prefix("PHASES(") {
            Some(arguments) => {
                let name = arguments.split(',').next().unwrap_or_default().trim();
                self.functions.extend([format!("{name}GetWorkspaceSize"), name.to_owned()]);
            }
            None => self.functions.extend(head.split([' ', '*', '\n']).next_back().map(str::to_owned)),
        }
    }
}

/// Returns a header without its comments and preprocessor lines.
fn statements(page: &str) -> String {
    let page: String = page
        .split("/*")
        .map(|part| part.split_once("*/").map_or(part, |(_, statements)| statements))
        .collect();
    let mut goes_on = false;
    let kept = page.lines().filter(|line| {
        let directive = goes_on || line.starts_with('#');
        goes_on = directive && line.ends_with('\\');
        !directive
    });
    kept.collect::<Vec<_>>().join("\n")
}

/// Returns the name of a field in `type name;` or `type name[length];`.
fn field(text: &str) -> Option<String> {
    let name = text.trim_end_matches(';').split('[').next()?;
    name.split([' ', '*']).next_back().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// A comparison: the C++ file to compile, and the names that it skips.
#[derive(Debug)]
pub(crate) struct Comparison {
    page: String,
    /// Number of declarations that the headers also have.
    pub(crate) compared: usize,
    /// Names that the headers do not have.
    pub(crate) absent: Vec<String>,
}

/// Compares the declarations in `ascend.h` with headers whose contents are `texts`. `include` lists the
/// headers that the C++ file includes.
fn compare(facts: &Facts, texts: &str, include: &[String]) -> Comparison {
    let known: HashSet<&str> = texts.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    let (mut before, mut after, mut absent, mut compared) = (String::new(), String::new(), Vec::new(), 0);
    let mut ask = |name: &str, line: &dyn Fn(&mut String, &mut String)| {
        if known.contains(name) {
            compared += 1;
            line(&mut before, &mut after);
        } else {
            absent.push(name.to_owned());
        }
    };
    for name in &facts.values {
        ask(name, &|before, after| {
            // Some versions define macros, which must not replace our names.
            let _ = writeln!(before, "constexpr long long our_{name} = ours::{name};");
            let _ = writeln!(after, "static_assert(our_{name} == (long long)({name}), \"value of {name}\");");
        });
    }
    for (name, fields) in &facts.structs {
        ask(name, &|_, after| {
            let _ = writeln!(
                after,
                "static_assert(sizeof(ours::{name}) == sizeof(::{name}), \"size of {name}\");"
            );
            for field in fields {
                let _ = writeln!(
                    after,
                    "static_assert(offsetof(ours::{name}, {field}) == offsetof(::{name}, {field}), \"place of \
                     {field} in {name}\");"
                );
            }
        });
    }
    for name in &facts.functions {
        ask(name, &|_, after| {
            let _ = writeln!(
                after,
                "static_assert(compare::same<decltype(ours::{name}), decltype(::{name})>(), \"prototype of {name}\");"
            );
        });
    }
    let mut page =
        "#include <cstddef>\n#include <cstdint>\n#define ASCEND_IN_A_NAMESPACE\nnamespace ours {\n#include \
                    \"ascend.h\"\n}\n#include \"compare.hpp\"\n"
            .to_owned();
    page += &before;
    for header in include {
        let _ = writeln!(page, "#include \"{header}\"");
    }
    page += &after;
    Comparison { page, compared, absent }
}

/// Compares `ffi/ascend.h` with the headers in some folders: writes the C++ file to `page` and compiles it.
///
/// # Errors
/// Returns the differences as the compiler reports them, or the reason why nothing can be compared.
pub(crate) fn compare_with(
    ffi: &Path,
    folders: &[PathBuf],
    page: &Path,
    compiler: &str,
) -> Result<Comparison, String> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let header = ffi.join("ascend.h");
    let text = std::fs::read_to_string(&header).map_err(|error| failed(&header, error))?;
    let comparison = compare(&Facts::of(&text), &texts(folders), &headers(folders));
    std::fs::write(page, &comparison.page).map_err(|error| failed(page, error))?;
    let mut command = Command::new(compiler);
    // Failed assertions are searched for in English, so the compiler must not translate its messages.
    command.env("LC_ALL", "C");
    command.args(["-std=c++14", "-fsyntax-only", "-Wno-deprecated", "-I"]).arg(ffi);
    for folder in folders {
        command.arg("-I").arg(folder);
    }
    let output =
        command.arg(page).output().map_err(|error| format!("`{compiler}` cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(comparison);
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Returns the contents of all headers in the folders and their subfolders, as one string.
fn texts(folders: &[PathBuf]) -> String {
    let (mut text, mut left) = (String::new(), folders.to_vec());
    while let Some(folder) = left.pop() {
        for entry in folder.read_dir().into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|end| end == "h") {
                text += &std::fs::read_to_string(&path).unwrap_or_default();
            }
        }
    }
    text
}

/// Returns the [`HEADERS`] and the operators' headers that are in one of the folders.
fn headers(folders: &[PathBuf]) -> Vec<String> {
    let mut found: Vec<String> = HEADERS
        .iter()
        .filter(|header| folders.iter().any(|folder| folder.join(header).is_file()))
        .map(|&header| header.to_owned())
        .collect();
    for folder in folders {
        let operators = folder.join("aclnnop");
        let Ok(entries) = operators.read_dir() else { continue };
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        found.extend(names.iter().filter_map(|name| name.to_str()).map(|name| format!("aclnnop/{name}")));
    }
    found
}
