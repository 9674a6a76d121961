//! Kernels that NVRTC compiles on this machine from the same sources as the committed kernels. They are
//! cached in a folder, and compiled again if their cache entry is damaged.

use kvbackend_cuda::{CudaBackend, CudaOptions, KernelCode};
use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, allocate_tensor};

use crate::common::{download, noise, upload};
use crate::double::{EAGER, among_others};

#[test]
fn compiled_kernels_are_kept_and_a_damaged_entry_is_compiled_again() {
    let _shared = among_others();
    let folder = tempfile::tempdir().unwrap();
    let run = || -> kvcore::Result<()> {
        let kernels = KernelCode::Compiled { keep_in: Some(folder.path().join("kernels")) };
        let backend = CudaBackend::with_options(&CudaOptions { device: EAGER, kernels })?;
        let stream = backend.stream()?;
        let src = upload(backend.as_ref(), DType::U8, &[100], &noise(1, 100));
        let dst = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[100])?;
        stream.copy_tensor(&CopyTensor { src, dst: dst.clone() })?;
        assert_eq!(download(stream.as_ref(), &dst), noise(1, 100));
        Ok(())
    };
    match run() {
        Err(reason @ Error::NoDevice { .. }) => return kvconform::skip(reason),
        other => other.unwrap(),
    }
    let entries = || -> Vec<_> {
        std::fs::read_dir(folder.path().join("kernels")).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let [entry] = &entries()[..] else { panic!("one module is one entry: {:?}", entries()) };
    let good = std::fs::read(entry).unwrap();
    assert!(String::from_utf8_lossy(&good).contains(".entry copy_tensor"));
    for damage in [good[..good.len() / 2].to_vec(), Vec::new(), vec![0; 5000]] {
        std::fs::write(entry, damage).unwrap();
        run().unwrap();
        assert_eq!(std::fs::read(entry).unwrap(), good);
    }
    assert_eq!(entries().len(), 1, "nothing else is left in the folder");
}
