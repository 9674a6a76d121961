//! `cargo xtask cuda-ptx`: the kernels of the CUDA backend, compiled to the PTX that is part of the crate.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::run::{Result, root};
use crate::tools::{Tool, require};

/// Options of `cargo xtask cuda-ptx`.
#[derive(Args)]
pub(crate) struct CudaPtxArgs {
    /// Compare with the committed PTX and write nothing; fail if they differ.
    #[arg(long)]
    check: bool,
}

/// Python wheels that hold the compiler. Others of a release would make other PTX.
const WHEELS: &str = "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
     nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85";

/// The folder of the wheels, below the root of the workspace.
const TOOLS: &str = "target/cuda-tools";

/// The compiler.
pub(crate) const NEEDS: &[Tool] = &[Tool::CudaCompiler];

/// The oldest architecture that the kernels serve; newer devices compile its PTX for themselves.
const ARCH: &str = "sm_80";

/// Architectures for which the PTX is compiled to the end, to see registers and spills.
const CUBINS: [&str; 2] = ["sm_80", "sm_90"];

/// The PTX version of the oldest driver that the backend accepts, that of CUDA 12.0. The compiler writes its own, which
/// older drivers refuse although the instructions are theirs.
const PTX_VERSION: &str = ".version 8.0";

/// Returns whether the compiler is here.
pub(crate) fn is_here() -> bool {
    program("nvcc").is_file()
}

/// Returns the command that brings the compiler.
pub(crate) fn bring() -> String {
    // Wheels carry no permission to run.
    format!(
        "python3 -m pip install -q --no-deps --target {TOOLS} {WHEELS} && chmod -R u+x {TOOLS}/nvidia/cu13/bin \
         {TOOLS}/nvidia/cu13/nvvm/bin"
    )
}

/// Returns the folder of the compiler's libraries.
pub(crate) fn libraries() -> PathBuf {
    root().join(TOOLS).join("nvidia/cu13/lib")
}

fn program(name: &str) -> PathBuf {
    root().join(TOOLS).join("nvidia/cu13/bin").join(name)
}

pub(crate) fn cuda_ptx(args: &CudaPtxArgs) -> Result {
    require("`cargo xtask cuda-ptx`", NEEDS)?;
    let crate_folder = root().join("kvbackend-cuda");
    let made = root().join("target/cuda-ptx");
    std::fs::create_dir_all(&made).map_err(|e| format!("{}: {e}", made.display()))?;
    let sources = sources(&crate_folder.join("kernels"))?;
    let mut different = Vec::new();
    let mut table = format!(
        "{:<24} {:<6} {:>9} {:>12} {:>12}\n",
        "kernel", "arch", "registers", "spilled in", "spilled out"
    );
    let compiled: Vec<Result<(String, Vec<Usage>)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = sources
            .iter()
            .map(|source| {
                let made = &made;
                scope.spawn(move || compile(source, made))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err("a thread of the compiler panicked".to_owned()))
            })
            .collect()
    });
    for (source, compiled) in sources.iter().zip(compiled) {
        let (text, usages) = compiled?;
        let committed = crate_folder.join("ptx").join(file_name(source, "ptx"));
        if args.check {
            if std::fs::read_to_string(&committed).ok().as_deref() != Some(text.as_str()) {
                different.push(committed.display().to_string());
            }
        } else {
            std::fs::write(&committed, &text).map_err(|e| format!("{}: {e}", committed.display()))?;
        }
        for usage in usages {
            let Usage { kernel, arch, registers, loads, stores } = usage;
            // Writing to a string cannot fail.
            let _ = writeln!(table, "{kernel:<24} {arch:<6} {registers:>9} {loads:>12} {stores:>12}");
        }
    }
    print!("{table}");
    if different.is_empty() {
        println!("{} files of PTX {}", sources.len(), if args.check { "are up to date" } else { "written" });
        return Ok(());
    }
    Err(format!("not what the sources compile to: {}; run `cargo xtask cuda-ptx`", different.join(", ")))
}

/// Returns the sources of kernels, in order.
pub(crate) fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut sources: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    sources.sort();
    Ok(sources)
}

fn file_name(source: &Path, extension: &str) -> PathBuf {
    PathBuf::from(source.file_name().unwrap_or_default()).with_extension(extension)
}

/// What a kernel takes of a multiprocessor.
struct Usage {
    kernel: String,
    arch: &'static str,
    registers: u32,
    loads: u32,
    stores: u32,
}

/// Compiles a source to PTX, and the PTX to the end for each architecture. Returns the PTX as it is committed.
fn compile(source: &Path, made: &Path) -> Result<(String, Vec<Usage>)> {
    let ptx = made.join(file_name(source, "ptx"));
    let mut nvcc = Command::new(program("nvcc"));
    nvcc.args(["-ptx", "-std=c++17", "-arch", ARCH, "-o"]).arg(&ptx).arg(source);
    output(&mut nvcc)?;
    let text = std::fs::read_to_string(&ptx).map_err(|e| format!("{}: {e}", ptx.display()))?;
    let text = portable(&text);
    std::fs::write(&ptx, &text).map_err(|e| format!("{}: {e}", ptx.display()))?;
    let mut usages = Vec::new();
    for arch in CUBINS {
        let cubin = made.join(file_name(source, &format!("{arch}.cubin")));
        let mut ptxas = Command::new(program("ptxas"));
        ptxas.args(["-v", "-arch", arch, "-o"]).arg(cubin).arg(&ptx);
        usages.extend(usages_of(&output(&mut ptxas)?, arch));
    }
    Ok((text, usages))
}

/// Returns PTX that older drivers accept: in an older version, without hints that came later, and without the name of
/// the compiler's build.
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

/// Reads what `ptxas -v` says of each kernel.
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

/// Runs a program and returns what it prints.
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
