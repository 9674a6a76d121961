//! `cargo xtask cuda-double`: the test double of the CUDA driver, a library that runs the backend's kernels on the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use clap::Args;

use crate::cuda_ptx::sources;
use crate::run::{Result, root, run, skip};
use crate::tools::{Tool, require};

/// The folder of the library, below the root of the workspace. Programs find it by `LD_LIBRARY_PATH`.
const FOLDER: &str = "target/cuda-double";

/// A C++ compiler.
pub(crate) const NEEDS: &[Tool] = &[Tool::Program("g++", "g++")];

const FLAGS: [&str; 9] =
    ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread"];

/// Further flags for kernels: an access that a device would trap on is a fault here too.
const KERNEL_FLAGS: [&str; 4] = [
    "-DKV_DOUBLE",
    "-Wno-unknown-pragmas",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
];

/// The names under which the library is looked for: the driver's, cuBLAS's and NCCL's.
const LINKS: [&str; 3] = ["libcuda.so", "libcublas.so", "libnccl.so.2"];

/// Options of `cargo xtask cuda-double`.
#[derive(Args)]
pub(crate) struct CudaDoubleArgs {
    /// Build and run the double's own tests instead: of fibres, streams, memory, faults and graphs.
    #[arg(long)]
    selftest: bool,
}

/// Builds what is older than its sources, and prints where the library is.
pub(crate) fn cuda_double(args: &CudaDoubleArgs) -> Result {
    if args.selftest {
        return selftest();
    }
    let folder = build()?;
    println!("{}", folder.display());
    println!("for example: LD_LIBRARY_PATH={FOLDER} cargo run --release -p kvcli --features cuda -- devices");
    Ok(())
}

/// Builds the double with kernels of its own tests, and runs them.
fn selftest() -> Result {
    require("the double of the CUDA driver", NEEDS)?;
    let double = root().join("kvbackend-cuda/double");
    let folder = root().join(FOLDER).join("selftest");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let job =
        |name: &str, source: PathBuf, flags| Job { object: folder.join(name), changed: None, flags, source };
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

/// Links objects to a library.
fn link<'a>(library: &Path, objects: impl Iterator<Item = &'a PathBuf>, double: &Path) -> Result {
    let mut link = Command::new("g++");
    link.args(["-shared", "-pthread", "-Wl,-soname,libcuda.so.1,-z,nodelete,-z,defs"]);
    link.arg(format!("-Wl,--version-script={}", double.join("exports.map").display()));
    finish(link.arg("-o").arg(library).args(objects))
}

/// Adds the library to where a command looks for libraries, after building it if need be. A machine with the driver
/// itself uses that; one without a C++ compiler has no device. The compiler's library at run time comes with its wheels.
pub(crate) fn provide(command: &mut Command) -> Result {
    let mut folders = vec![crate::cuda_ptx::libraries()];
    if !driver_is_here() {
        match require("the double of the CUDA driver", NEEDS) {
            Ok(()) => folders.push(build()?),
            Err(missing) => skip(&missing)?,
        }
    }
    command.env("LD_LIBRARY_PATH", library_path(folders));
    Ok(())
}

/// Adds the double to where a command looks for libraries, also on a machine with the driver itself.
pub(crate) fn insist(command: &mut Command) -> Result {
    command.env("LD_LIBRARY_PATH", library_path(vec![build()?, crate::cuda_ptx::libraries()]));
    Ok(())
}

/// Returns whether the system has a CUDA driver.
pub(crate) fn driver_is_here() -> bool {
    Path::new("/proc/driver/nvidia/version").exists() || Path::new("/dev/nvidiactl").exists()
}

/// Returns the folders before those that the environment names.
fn library_path(folders: Vec<PathBuf>) -> std::ffi::OsString {
    let before = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty());
    let paths = folders.into_iter().chain(before.iter().flat_map(std::env::split_paths));
    std::env::join_paths(paths).unwrap_or_default()
}

/// Builds the library and returns its folder.
pub(crate) fn build() -> Result<PathBuf> {
    require("the double of the CUDA driver", NEEDS)?;
    let crate_folder = root().join("kvbackend-cuda");
    let (double, kernels) = (crate_folder.join("double"), crate_folder.join("kernels"));
    let folder = root().join(FOLDER);
    let objects = folder.join("objects");
    std::fs::create_dir_all(&objects).map_err(|e| format!("{}: {e}", objects.display()))?;
    // All sources of the double are one unit, which compiles faster than one by one.
    let double_changed = newest(&double, &["cpp", "hpp", "h"])?;
    let headers = newest(&double, &["hpp"])?.max(newest(&kernels, &["cuh"])?);
    let all = double.join("all.cpp");
    let mut jobs =
        vec![Job { object: objects.join("all.o"), changed: double_changed, flags: &[], source: all }];
    for source in sources(&kernels)? {
        let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let changed = headers.max(modified(&source));
        jobs.push(Job { object: objects.join(name + ".o"), changed, flags: &KERNEL_FLAGS, source });
    }
    let stale: Vec<&Job> = jobs.iter().filter(|job| modified(&job.object) < job.changed).collect();
    compile_all(&stale, &[&double, &kernels])?;
    let library = folder.join("libcuda.so.1");
    let linked = modified(&library);
    if linked.is_none() || jobs.iter().any(|job| modified(&job.object) > linked) {
        // Linked beside it and then moved, so that a program that has it loaded keeps what it has.
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

/// A source to compile.
struct Job {
    source: PathBuf,
    object: PathBuf,
    /// The last change of the source or of a header.
    changed: Option<SystemTime>,
    flags: &'static [&'static str],
}

/// Compiles sources to objects, as many at a time as there are processors.
fn compile_all(jobs: &[&Job], includes: &[&Path]) -> Result {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let work = || -> Result {
        while let Some(job) = jobs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            let mut compile = Command::new("g++");
            compile.args(FLAGS).args(job.flags);
            for include in includes {
                compile.arg("-I").arg(include);
            }
            compile.args(["-c", "-x", "c++", "-o"]).arg(&job.object).arg(&job.source);
            finish(&mut compile)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err("a thread of the build panicked".to_owned()))
        })
    })
}

fn finish(command: &mut Command) -> Result {
    let output = command.output().map_err(|e| format!("g++ cannot be run: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr)))
}

fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|end| extensions.iter().any(|known| end == *known)))
        .collect();
    files.sort();
    Ok(files)
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|data| data.modified()).ok()
}

fn newest(folder: &Path, extensions: &[&str]) -> Result<Option<SystemTime>> {
    Ok(files(folder, extensions)?.iter().filter_map(|path| modified(path)).max())
}
