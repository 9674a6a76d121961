//! `cargo xtask cuda-double`: builds the CUDA driver's test double, a library that runs the backend's kernels
//! on the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use clap::Args;

use crate::cuda_compiler::{files, libraries};
use crate::run::{Result, create_folder, in_parallel, root, run, skip};
use crate::tools::{Tool, require};

/// The library's folder, relative to the workspace root. Programs find it through `LD_LIBRARY_PATH`.
const FOLDER: &str = "target/cuda-double";

/// The only tool needed to build the double: a C++ compiler.
pub const NEEDS: &[Tool] = &[Tool::Program("g++", "g++")];

const FLAGS: [&str; 9] =
    ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread"];

/// Extra flags for kernels. An access that would trap on a device is also a fault in the double.
const KERNEL_FLAGS: [&str; 4] = [
    "-DKV_DOUBLE",
    "-Wno-unknown-pragmas",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
];

/// The names that programs load the driver, cuBLAS and NCCL by.
const LINKS: [&str; 3] = ["libcuda.so", "libcublas.so", "libnccl.so.2"];

/// Options of `cargo xtask cuda-double`.
#[derive(Args)]
pub struct CudaDoubleArgs {
    /// Instead, build and run the double's own tests, which cover fibres, streams, memory, faults and graphs.
    #[arg(long)]
    selftest: bool,
}

/// Compiles the source files that changed, and prints the library's folder.
pub fn cuda_double(args: &CudaDoubleArgs) -> Result {
    if args.selftest {
        return selftest();
    }
    let folder = build()?;
    println!("{}", folder.display());
    println!("for example: LD_LIBRARY_PATH={FOLDER} cargo run --release -p kvcli --features cuda -- devices");
    Ok(())
}

/// Builds the double together with its test kernels, and runs its tests.
fn selftest() -> Result {
    require("the double of the CUDA driver", NEEDS)?;
    let double = root().join("kvbackend-cuda/double");
    let folder = root().join(FOLDER).join("selftest");
    create_folder(&folder)?;
    let job = |name: &str, source: PathBuf, flags| CompileJob {
        object: folder.join(name),
        changed: None,
        flags,
        source,
    };
    let tests = double.join("selftest");
    let jobs = [
        job("all.o", double.join("all.cpp"), &[]),
        job("kernels.o", tests.join("kernels.cpp"), &KERNEL_FLAGS),
    ];
    compile_all(&jobs.iter().collect::<Vec<_>>(), &[&double])?;
    let library = folder.join("libcuda.so.1");
    link(&library, jobs.iter().map(|job| &job.object), &double)?;
    let program = folder.join("selftest");
    let mut compile = Command::new("g++");
    compile
        .args(["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(files(&tests, &["cpp"])?.into_iter().filter(|file| !file.ends_with("kernels.cpp")));
    finish(compile.arg(&library).arg("-o").arg(&program))?;
    run(Command::new(program).env("LD_LIBRARY_PATH", library_path(vec![folder])), "the double's own tests")
}

/// Links object files into a library.
fn link<'a>(library: &Path, objects: impl Iterator<Item = &'a PathBuf>, double: &Path) -> Result {
    let mut link = Command::new("g++");
    link.args(["-shared", "-pthread", "-Wl,-soname,libcuda.so.1,-z,nodelete,-z,defs"]);
    link.arg(format!("-Wl,--version-script={}", double.join("exports.map").display()));
    finish(link.arg("-o").arg(library).args(objects))
}

/// Adds the double to a command's library path, unless the machine has the driver. Builds the double if it is
/// out of date. Without a C++ compiler, the command finds no device. NVRTC comes from the compiler's wheels.
pub fn provide(command: &mut Command) -> Result {
    let mut folders = vec![libraries()];
    if !driver_is_here() {
        match require("the double of the CUDA driver", NEEDS) {
            Ok(()) => folders.push(build()?),
            Err(missing) => skip(&missing)?,
        }
    }
    command.env("LD_LIBRARY_PATH", library_path(folders));
    Ok(())
}

/// Adds the double to a command's library path, even on a machine with the driver.
pub fn insist(command: &mut Command) -> Result {
    command.env("LD_LIBRARY_PATH", library_path(vec![build()?, libraries()]));
    Ok(())
}

/// Returns true if the system has a CUDA driver.
pub fn driver_is_here() -> bool {
    Path::new("/proc/driver/nvidia/version").exists() || Path::new("/dev/nvidiactl").exists()
}

/// Returns a library search path: these folders, then the ones in the environment.
fn library_path(folders: Vec<PathBuf>) -> std::ffi::OsString {
    let before = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty());
    let paths = folders.into_iter().chain(before.iter().flat_map(std::env::split_paths));
    std::env::join_paths(paths).unwrap_or_default()
}

/// Builds the library and returns its folder.
fn build() -> Result<PathBuf> {
    require("the double of the CUDA driver", NEEDS)?;
    let crate_folder = root().join("kvbackend-cuda");
    let (double, kernels) = (crate_folder.join("double"), crate_folder.join("kernels"));
    let folder = root().join(FOLDER);
    let objects = folder.join("objects");
    create_folder(&objects)?;
    // All of the double's source files are one compilation unit, which compiles faster than separate ones.
    let double_changed = newest(&double, &["cpp", "hpp", "h"])?;
    let headers = newest(&double, &["hpp"])?.max(newest(&kernels, &["cuh"])?);
    let all = double.join("all.cpp");
    let mut jobs =
        vec![CompileJob { object: objects.join("all.o"), changed: double_changed, flags: &[], source: all }];
    for source in files(&kernels, &["cu"])? {
        let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let changed = headers.max(modified(&source));
        jobs.push(CompileJob { object: objects.join(name + ".o"), changed, flags: &KERNEL_FLAGS, source });
    }
    let stale: Vec<&CompileJob> = jobs.iter().filter(|job| modified(&job.object) < job.changed).collect();
    compile_all(&stale, &[&double, &kernels])?;
    let library = folder.join("libcuda.so.1");
    let linked = modified(&library);
    if linked.is_none() || jobs.iter().any(|job| modified(&job.object) > linked) {
        // The library is linked under another name and then renamed, so a program that has loaded the
        // library keeps the old file.
        let next = folder.join("libcuda.so.next");
        link(&next, jobs.iter().map(|job| &job.object), &double)?;
        std::fs::rename(&next, &library).map_err(|e| format!("{}: {e}", library.display()))?;
    }
    for name in LINKS {
        let link = folder.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink("libcuda.so.1", &link)
                .map_err(|e| format!("{}: {e}", link.display()))?;
        }
    }
    Ok(folder)
}

/// A source file to compile.
struct CompileJob {
    source: PathBuf,
    object: PathBuf,
    /// The time of the last change to the source file or one of its headers.
    changed: Option<SystemTime>,
    flags: &'static [&'static str],
}

/// Compiles source files to object files.
fn compile_all(jobs: &[&CompileJob], includes: &[&Path]) -> Result {
    let compile = |job: &&CompileJob| {
        let mut compile = Command::new("g++");
        compile.args(FLAGS).args(job.flags);
        for include in includes {
            compile.arg("-I").arg(include);
        }
        compile.args(["-c", "-x", "c++", "-o"]).arg(&job.object).arg(&job.source);
        finish(&mut compile)
    };
    in_parallel(jobs, compile).map(drop)
}

fn finish(command: &mut Command) -> Result {
    let output = command.output().map_err(|e| format!("g++ cannot be run: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr)))
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|data| data.modified()).ok()
}

fn newest(folder: &Path, extensions: &[&str]) -> Result<Option<SystemTime>> {
    Ok(files(folder, extensions)?.iter().filter_map(|path| modified(path)).max())
}
