//! Kernels that NVRTC compiles for this machine's GPU, cached in a folder.
//!
//! The name of a cache entry is a hash of everything that its code depends on: the source, the options, and
//! the versions of the compiler and the driver. The entry starts with a hash of its contents. If that hash
//! does not match, the code is compiled again and the entry is replaced.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use cudarc::nvrtc::{result, sys};
use kvcore::{Error, Result};

use crate::driver::NAME;
use crate::facts::DeviceFacts;

/// The kernels' headers, with the names under which sources include them.
const HEADERS: &[(&str, &str)] = &[
    ("attend.cuh", include_str!("../kernels/attend.cuh")),
    ("attend_mma.cuh", include_str!("../kernels/attend_mma.cuh")),
    ("attend_plain.cuh", include_str!("../kernels/attend_plain.cuh")),
    ("attend_query.cuh", include_str!("../kernels/attend_query.cuh")),
    ("attend_tile.cuh", include_str!("../kernels/attend_tile.cuh")),
    ("device.cuh", include_str!("../kernels/device.cuh")),
    ("element.cuh", include_str!("../kernels/element.cuh")),
    ("places.cuh", include_str!("../kernels/places.cuh")),
    ("weight.cuh", include_str!("../kernels/weight.cuh")),
];

/// Length of the hash at the start of an entry, in bytes.
const HASH: usize = blake3::OUT_LEN;

/// Returns a source's PTX for a GPU. Reads the PTX from `folder` if the folder contains a valid entry.
/// Otherwise, compiles the source, and adds an entry if there is a folder.
///
/// # Errors
/// Returns [`Error::NoDevice`] if NVRTC is not found, and [`Error::Device`] with NVRTC's log if NVRTC
/// rejects the source. A failed write to the folder is not an error: the next call then compiles the source
/// again.
pub(crate) fn ptx(source: &str, facts: &DeviceFacts, folder: Option<&Path>) -> Result<String> {
    let compiler = version()?;
    let driver = crate::driver::version()?;
    let (major, minor) = facts.compute_capability;
    let options = ["--std=c++17".to_owned(), format!("--gpu-architecture=compute_{major}{minor}")];
    let source = flattened(source);
    let mut hasher = blake3::Hasher::new_derive_key("kvbackend-cuda kernels v1");
    for part in [&source, &options.join(" "), &format!("{compiler:?} {driver}")] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let entry = folder.map(|folder| folder.join(format!("{}.ptx", hasher.finalize().to_hex())));
    if let Some(kept) = entry.as_deref().and_then(read) {
        return Ok(kept);
    }
    let made = compiled(&source, &options)?;
    if let Some(entry) = entry {
        let _ = write(&entry, &made);
    }
    Ok(made)
}

/// Returns the source with its include lines replaced with the headers. Each header is inserted only once.
fn flattened(source: &str) -> String {
    fn add(text: &str, known: &mut Vec<&'static str>, out: &mut String) {
        for line in text.lines() {
            let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            match name.and_then(|name| HEADERS.iter().find(|(known, _)| *known == name)) {
                Some((name, text)) if !known.contains(name) => {
                    known.push(name);
                    add(text, known, out);
                }
                Some(_) => {}
                None if line == "#pragma once" => {}
                None => {
                    out.push_str(line);
                    out.push('\n');
                }
            }
        }
    }
    let mut out = String::new();
    add(source, &mut Vec::new(), &mut out);
    out
}

/// Returns the contents of an entry, or `None` if it is missing or damaged.
fn read(entry: &Path) -> Option<String> {
    let bytes = fs::read(entry).ok()?;
    let (hash, contents) = bytes.split_at_checked(HASH)?;
    if blake3::hash(contents).as_bytes() != hash {
        return None;
    }
    String::from_utf8(contents.to_vec()).ok()
}

/// Writes an entry under a temporary name and then renames it, so that other processes never read a partial
/// entry.
fn write(entry: &Path, contents: &str) -> std::io::Result<()> {
    let folder = entry.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder)?;
    let mut bytes = blake3::hash(contents.as_bytes()).as_bytes().to_vec();
    bytes.extend_from_slice(contents.as_bytes());
    let own = entry.with_extension(format!("{}.new", std::process::id()));
    fs::write(&own, bytes)?;
    fs::rename(&own, entry)
}

/// Returns NVRTC's version.
fn version() -> Result<(i32, i32)> {
    // SAFETY: loading a library runs its initialisers; NVRTC's have no other effect.
    if !unsafe { sys::is_culib_present() } {
        let reason = "the compiler library (libnvrtc.so.13 or .12, nvrtc64) was not found; install CUDA's NVRTC, name its \
                      folder in LD_LIBRARY_PATH, or use the kernels that are part of the program";
        return Err(Error::NoDevice { backend: NAME, reason: reason.to_owned() });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for writes.
    let status = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    status.result().map_err(|error| refused(&error.to_string()))?;
    Ok((major, minor))
}

fn refused(reason: &str) -> Error {
    Error::Device { backend: NAME, reason: format!("NVRTC: {reason}") }
}

/// Compiles a source that has no include lines.
fn compiled(source: &str, options: &[String]) -> Result<String> {
    let text = CString::new(source).map_err(|error| refused(&error.to_string()))?;
    let program = result::create_program(&text, None).map_err(|error| refused(&error.to_string()))?;
    let read = |bytes: Vec<std::ffi::c_char>| {
        let bytes: Vec<u8> = bytes.into_iter().map(i8::cast_unsigned).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    // SAFETY: `program` stays alive until the last line of the block, and `text` outlives it.
    unsafe {
        let made = match result::compile_program(program, options) {
            Ok(()) => result::get_ptx(program).map(read).map_err(|error| refused(&error.to_string())),
            Err(error) => {
                let log = result::get_program_log(program).map(read).unwrap_or_default();
                Err(refused(&format!("{error}: {log}")))
            }
        };
        let _ = result::destroy_program(program);
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_put_in_once() {
        let text = flattened("#include \"weight.cuh\"\n#include \"element.cuh\"\nint x;\n");
        assert!(!text.contains("#include \"weight.cuh\"") && !text.contains("#include \"element.cuh\""));
        assert_eq!(text.matches("void load8(").count(), 1);
        assert!(text.ends_with("int x;\n"));
    }

    #[test]
    fn every_header_of_the_kernels_is_known() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        for file in fs::read_dir(folder).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let header = Path::new(&name).extension().is_some_and(|end| end == "cuh");
            assert_eq!(header, HEADERS.iter().any(|(known, _)| *known == name), "{name}");
        }
    }

    #[test]
    fn an_entry_that_was_changed_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let entry = folder.path().join("kept").join("a.ptx");
        write(&entry, "contents").unwrap();
        assert_eq!(read(&entry).as_deref(), Some("contents"));
        for damage in [&[][..], &[1, 2, 3], &[0; 40]] {
            fs::write(&entry, damage).unwrap();
            assert_eq!(read(&entry), None);
        }
        write(&entry, "contents").unwrap();
        let mut bytes = fs::read(&entry).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&entry, bytes).unwrap();
        assert_eq!(read(&entry), None);
    }
}
