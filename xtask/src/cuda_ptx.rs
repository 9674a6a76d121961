//! `cargo xtask cuda-ptx`: compiles the CUDA backend's kernels to the PTX that the crate includes.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use xtask::cuda_compiler::{COMPILER, files, program};
use xtask::run::{Result, create_folder, in_parallel, none_of, read, root, write};
use xtask::tools::{Tool, require};

/// Options of `cargo xtask cuda-ptx`.
#[derive(Args)]
pub(crate) struct CudaPtxArgs {
    /// Compare with the committed PTX, write nothing, and fail if they differ.
    #[arg(long)]
    check: bool,
}

/// Tools that `cargo xtask cuda-ptx` needs.
pub(crate) const NEEDS: &[Tool] = &[COMPILER];

/// The oldest architecture that the kernels support. Drivers compile its PTX for newer devices.
const ARCH: &str = "sm_80";

/// The architectures that the PTX is assembled for, to report register usage and spills.
const CUBINS: [&str; 2] = ["sm_80", "sm_90"];

// Decision: docs/decisions/backend-cuda.md#the-ptx-is-written-for-older-drivers
/// The PTX version of CUDA 12.0, the oldest driver that the backend accepts. The compiler writes its own
/// version, which older drivers reject although they support all the instructions used.
const PTX_VERSION: &str = ".version 8.0";

pub(crate) fn cuda_ptx(args: &CudaPtxArgs) -> Result {
    require("`cargo xtask cuda-ptx`", NEEDS)?;
    let crate_folder = root().join("kvbackend-cuda");
    let made = root().join("target/cuda-ptx");
    create_folder(&made)?;
    let sources = files(&crate_folder.join("kernels"), &["cu"])?;
    let mut different = Vec::new();
    let texts = in_parallel(&sources, |source| compile(source, &made))?;
    for (source, text) in sources.iter().zip(texts) {
        let committed = crate_folder.join("ptx").join(file_name(source, "ptx"));
        if !args.check {
            write(&committed, &text)?;
        } else if read(&committed).ok() != Some(text) {
            different.push(committed.display().to_string());
        }
    }
    none_of("differ from the compiled sources; run `cargo xtask cuda-ptx`", &different)?;
    println!("{} files of PTX {}", sources.len(), if args.check { "are up to date" } else { "written" });
    // If the PTX is up to date, it was assembled when it was written.
    if args.check { Ok(()) } else { assemble(&sources, &made) }
}

/// Assembles all PTX files for every architecture, and prints the kernels' resource usage.
fn assemble(sources: &[PathBuf], made: &Path) -> Result {
    println!("{:<24} {:<6} {:>9} {:>12} {:>12}", "kernel", "arch", "registers", "spilled in", "spilled out");
    let of_source = |source: &PathBuf| CUBINS.map(|arch| usages(source, made, arch)).into_iter().collect();
    let all: Vec<Vec<Vec<Usage>>> = in_parallel(sources, of_source)?;
    for Usage { kernel, arch, registers, loads, stores } in all.into_iter().flatten().flatten() {
        println!("{kernel:<24} {arch:<6} {registers:>9} {loads:>12} {stores:>12}");
    }
    Ok(())
}

fn file_name(source: &Path, extension: &str) -> PathBuf {
    PathBuf::from(source.file_name().unwrap_or_default()).with_extension(extension)
}

/// Resources that a kernel uses.
struct Usage {
    kernel: String,
    arch: &'static str,
    registers: u32,
    loads: u32,
    stores: u32,
}

/// Compiles a source file. Returns the PTX to commit.
fn compile(source: &Path, made: &Path) -> Result<String> {
    let ptx = made.join(file_name(source, "ptx"));
    let mut nvcc = Command::new(program("nvcc"));
    nvcc.args(["-ptx", "-std=c++17", "-arch", ARCH, "-o"]).arg(&ptx).arg(source);
    output(&mut nvcc)?;
    let text = portable(&read(&ptx)?);
    write(&ptx, &text)?;
    Ok(text)
}

/// Assembles a source file's PTX for one architecture. Returns the resource usage of its kernels.
fn usages(source: &Path, made: &Path, arch: &'static str) -> Result<Vec<Usage>> {
    let mut ptxas = Command::new(program("ptxas"));
    ptxas.args(["-v", "-arch", arch, "-o"]).arg(made.join(file_name(source, &format!("{arch}.cubin"))));
    Ok(usages_of(&output(ptxas.arg(made.join(file_name(source, "ptx"))))?, arch))
}

/// Returns PTX that older drivers accept: with an older version number, without newer hints, and without the
/// compiler's build ID.
fn portable(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        let line = if line.starts_with(".version ") { PTX_VERSION } else { line };
        let comment = line.starts_with("//");
        if !comment && !line.trim_start().starts_with(".pragma \"used_bytes_mask") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Parses the output of `ptxas -v` into one entry per kernel.
fn usages_of(text: &str, arch: &'static str) -> Vec<Usage> {
    let mut usages = Vec::new();
    let (mut kernel, mut spills) = (String::new(), (0, 0));
    let number = |line: &str, before: &str| -> u32 {
        let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let at = words.windows(2).position(|pair| pair[1].starts_with(before));
        at.and_then(|at| words[at].parse().ok()).unwrap_or(0)
    };
    for line in text.lines() {
        if let Some(name) = line.split('\'').nth(1).filter(|_| line.contains("Compiling entry function")) {
            name.clone_into(&mut kernel);
        } else if line.contains("bytes spill stores") {
            let field = |at: usize| line.split(',').nth(at).map_or(0, |part| number(part, "bytes"));
            spills = (field(2), field(1));
        } else if line.contains("Used ") {
            let (loads, stores) = std::mem::take(&mut spills);
            let registers = number(line, "registers");
            usages.push(Usage { kernel: std::mem::take(&mut kernel), arch, registers, loads, stores });
        }
    }
    usages
}

/// Runs a program and returns its output.
fn output(command: &mut Command) -> Result<String> {
    let output =
        command.output().map_err(|e| format!("{} cannot be run: {e}", command.get_program().display()))?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(text) } else { Err(format!("{command:?} failed:\n{text}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_and_spills_are_read() {
        let text = "ptxas info    : 0 bytes gmem\n\
                    ptxas info    : Compiling entry function 'copy_rows' for 'sm_90'\n\
                    ptxas info    : Function properties for copy_rows\n    \
                    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n\
                    ptxas info    : Used 64 registers, used 0 barriers, 16 bytes cumulative stack size\n";
        let usages = usages_of(text, "sm_90");
        let usage = &usages[0];
        assert_eq!((usage.kernel.as_str(), usage.arch), ("copy_rows", "sm_90"));
        assert_eq!((usage.registers, usage.stores, usage.loads, usages.len()), (64, 20, 24, 1));
    }

    #[test]
    fn ptx_is_made_portable() {
        let made = "//\n// Compiler Build ID\n.version 9.0\n.target sm_80\n\t.pragma \"used_bytes_mask 3\";\n\tret;\n";
        assert_eq!(portable(made), ".version 8.0\n.target sm_80\n\tret;\n");
    }
}
