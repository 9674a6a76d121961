//! Compares the backend's bindings with the ones that another crate declares for the same functions.
//!
//! Both sets of bindings are Rust, and are read as text, because building the crate with its functions would
//! link to CANN. A CANN handle is an opaque pointer in that crate, and a pointer to a struct without fields
//! in ours. Enumerations are four-byte integers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use xtask::run::Result;

/// The declarations of a set of bindings: the type of each function, and the value of each constant.
#[derive(Debug, Default)]
pub(super) struct Declared {
    functions: BTreeMap<String, String>,
    values: BTreeMap<String, i128>,
}

/// The numbers of declarations that were compared.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) functions: usize,
    pub(super) values: usize,
}

impl Declared {
    /// Reads all Rust files in a folder.
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
        let mut declared = Self::default();
        for entry in fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                declared.read(&fs::read_to_string(&path).map_err(failed)?);
            }
        }
        Ok(declared)
    }

    fn read(&mut self, text: &str) {
        let text: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        // `pub fn name(…) -> type;`, and `pub name: Result<unsafe extern "C" fn(…) -> type, …>` in a table.
        for part in text.split("pub fn ").skip(1) {
            let Some((name, rest)) = part.split_once('(') else { continue };
            if let Some((declaration, _)) = rest.split_once(';') {
                self.function(name, declaration);
            }
        }
        for part in text.split("pub ").skip(1) {
            let Some((name, rest)) = part.split_once(':') else { continue };
            if let Some((head, rest)) = rest.split_once("extern \"C\" fn(")
                && head.trim_start().starts_with("Result<")
                && let Some((declaration, _)) = rest.split_once("::libloading")
            {
                self.function(name, declaration.trim_end().trim_end_matches(','));
            }
        }
        for part in text.split("pub const ").skip(1) {
            let value = part.split_once(';').and_then(|(statement, _)| statement.split_once('='));
            if let Some((name, value)) = value
                && let Some((name, _)) = name.split_once(':')
                && let Ok(value) = value.trim().replace('_', "").parse()
            {
                self.values.insert(name.trim().to_owned(), value);
            }
        }
    }

    fn function(&mut self, name: &str, declaration: &str) {
        let (arguments, result) = declaration.rsplit_once(')').unwrap_or((declaration, ""));
        let arguments = arguments.split(',').filter(|argument| !argument.trim().is_empty());
        let types = arguments.map(|argument| argument.split_once(':').map_or(argument, |(_, of)| of));
        let types: Vec<String> = types.map(plain).collect();
        let result = plain(result.trim().trim_start_matches("->"));
        self.functions.insert(name.trim().to_owned(), format!("({}) -> {result}", types.join(", ")));
    }

    /// Compares the declarations of the names that both sets of bindings declare.
    ///
    /// # Errors
    /// Returns the names that differ, with both declarations.
    pub(super) fn compare(&self, other: &Self) -> Result<Compared> {
        let (functions, different) = differences(&self.functions, &other.functions);
        let (values, of_values) = differences(&self.values, &other.values);
        let different = [different, of_values].concat();
        if different.is_empty() { Ok(Compared { functions, values }) } else { Err(different.join("\n")) }
    }
}

/// Returns the number of names in both maps, and the names whose declarations differ.
fn differences<T: PartialEq + std::fmt::Display>(
    ours: &BTreeMap<String, T>,
    theirs: &BTreeMap<String, T>,
) -> (usize, Vec<String>) {
    let both: Vec<_> =
        ours.iter().filter_map(|(name, ours)| theirs.get(name).map(|theirs| (name, ours, theirs))).collect();
    let different = both.iter().filter(|(_, ours, theirs)| ours != theirs);
    let lines =
        different.map(|(name, ours, theirs)| format!("{name}: {ours} here, {theirs} there")).collect();
    (both.len(), lines)
}

/// Returns a type without the names that two sets of bindings spell differently.
fn plain(text: &str) -> String {
    let words = text.split_whitespace().map(|word| {
        let word = word.rsplit("::").next().unwrap_or(word);
        match word {
            "aclrtStream" | "aclrtEvent" | "aclrtContext" | "aclmdlRI" => "*mut opaque",
            "c_void" | "aclTensor" | "aclScalar" | "aclIntArray" | "aclTensorList" | "aclOpExecutor" => {
                "opaque"
            }
            "aclError"
            | "aclnnStatus"
            | "c_int"
            | "i32"
            | "u32"
            | "aclDataType"
            | "aclFormat"
            | "aclrtMemMallocPolicy"
            | "aclrtMemcpyKind"
            | "aclrtStreamStatus" => "number",
            other => other,
        }
        .to_owned()
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(text: &str) -> Declared {
        let mut declared = Declared::default();
        declared.read(text);
        declared
    }

    const OURS: &str = "pub struct Acl {
        pub aclrtFree: Result<unsafe extern \"C\" fn(devPtr: *mut ::core::ffi::c_void) -> aclError, ::libloading::Error>,
        pub aclnnExp: Result<
            unsafe extern \"C\" fn(workspace: *mut ::core::ffi::c_void, size: u64, stream: aclrtStream) -> aclnnStatus,
            ::libloading::Error,
        >,
    }
    pub const ACL_FLOAT: aclDataType = 0;
    pub const ACL_BF16: aclDataType = 27;";

    #[test]
    fn tables_and_declarations_of_the_same_functions_are_equal() {
        let theirs = declared(
            "unsafe extern \"C\" {
                /// Frees: memory, `pub fn other();`
                pub fn aclrtFree(devPtr: *mut c_void) -> aclError;
                pub fn aclnnExp(
                    workspace: *mut c_void, // the workspace
                    size: u64,
                    stream: *mut c_void,
                ) -> aclnnStatus;
            }
            pub const ACL_BF16: aclDataType = 27;",
        );
        assert_eq!(declared(OURS).compare(&theirs), Ok(Compared { functions: 2, values: 1 }));
    }

    #[test]
    fn another_argument_and_another_value_are_named() {
        let theirs = declared(
            "pub fn aclrtFree(devPtr: *const c_void) -> aclError;
            pub const ACL_BF16: aclDataType = 26;",
        );
        let different = declared(OURS).compare(&theirs).unwrap_err();
        assert!(different.contains("aclrtFree: (*mut opaque)"), "{different}");
        assert!(different.contains("ACL_BF16: 27 here, 26 there"), "{different}");
    }
}
