//! Copies of tensors with any strides, compared with indexing on the host.

use std::sync::Arc;

use kvcore::{CopyTensor, DType, Dims, Error, MemoryKind, TensorView, allocate_tensor};

use crate::bench::{Bench, Outcome, ensure, equal, numbers, rounded};
use crate::oracle;

/// Returns all elements that `dst`'s storage must have after a copy of `src` to `dst`, computed by indexing.
fn copied(src: &TensorView, source: &[f32], dst: &TensorView, before: &[f32]) -> Vec<f32> {
    let mut after = before.to_vec();
    for (from, to) in oracle::elements(src).into_iter().zip(oracle::elements(dst)) {
        after[to] = source[from];
    }
    after
}

fn strided(base: &TensorView, shape: &[usize], strides: &[usize], offset: usize) -> Outcome<TensorView> {
    let (shape, strides) = (Dims::new(shape)?, Dims::new(strides)?);
    Ok(TensorView::with_strides(Arc::clone(base.storage()), base.dtype(), shape, strides, offset)?)
}

pub(super) fn any_strides_equal_indexing(b: &Bench) -> Outcome {
    let (from, to) = (numbers(40, 3 * 4 * 5 * 6), numbers(41, 6 * 8 * 5 * 7));
    let src = b.upload(b.dtype, &[3, 4, 5, 6], &from)?;
    let from = rounded(b.dtype, &from);
    let inner = |view: &TensorView| view.slice(0, 1, 4)?.slice(1, 3, 5)?.slice(3, 0, 4);
    let part = src.slice(1, 1, 3)?.slice(3, 2, 6)?;
    for (what, read, target) in [
        ("axes in another order", src.permute(&[2, 0, 3, 1])?, None),
        ("a part", part.clone(), None),
        ("a part into a part", part, Some(false)),
        ("a part into transposed memory", src.slice(1, 0, 2)?.slice(3, 1, 5)?, Some(true)),
        ("a row again and again", strided(&src, &[7, 6], &[0, 1], 12)?, None),
        ("every other element", strided(&src, &[4, 9], &[60, 2], 1)?, None),
        ("one element", strided(&src, &[], &[], 77)?, None),
        ("no element", src.slice(2, 5, 5)?, None),
    ] {
        let base = b.upload(b.dtype, &[6, 8, 5, 7], &to)?;
        let written = match target {
            None => strided(&base, read.shape(), &Dims::new(read.shape())?.dense_strides()?, 0)?,
            Some(false) => inner(&base)?,
            Some(true) => strided(&base, read.shape(), &[1, 3, 6, 30], 5)?,
        };
        let expected = copied(&read, &from, &written, &rounded(b.dtype, &to));
        b.stream.copy_tensor(&CopyTensor { src: read, dst: written })?;
        equal(what, &b.download(&base)?, &expected)?;
    }
    Ok(())
}

pub(super) fn parts_of_one_storage_may_be_copied(b: &Bench) -> Outcome {
    let values = numbers(42, 4 * 6);
    let base = b.upload(b.dtype, &[4, 6], &values)?;
    let (src, dst) = (base.select(0, 3)?, base.select(0, 1)?);
    let values = rounded(b.dtype, &values);
    let expected = copied(&src, &values, &dst, &values);
    b.stream.copy_tensor(&CopyTensor { src, dst })?;
    equal("a row over another of its matrix", &b.download(&base)?, &expected)
}

pub(super) fn elements_of_any_size_are_copied(b: &Bench) -> Outcome {
    let bytes: Vec<u8> = numbers(43, 64).iter().map(|x| (127.5 + 127.5 * x) as u8).collect();
    for dtype in DType::ALL {
        let per_row = 8 * 8 / dtype.bits();
        let (src, dst) = (b.tensor(dtype, &[8, per_row])?, b.tensor(dtype, &[5, 2, per_row / 2])?);
        b.stream.write(&src, &bytes)?;
        // No strides can give rows 7, 5, 3, 1; these give the right halves of rows 1, 3, 5, 7.
        let read = strided(&src, &[4, per_row / 2], &[2 * per_row, 1], per_row + per_row / 2)?;
        b.stream.copy_tensor(&CopyTensor { src: read, dst: dst.slice(0, 1, 5)?.select(1, 1)? })?;
        let mut got = [0; 40];
        b.stream.read(&dst, &mut got)?;
        let mut expected = [0; 40];
        for row in 0..4 {
            let from = (2 * row + 1) * 8 + 4;
            expected[(row + 1) * 8 + 4..(row + 2) * 8].copy_from_slice(&bytes[from..from + 4]);
        }
        ensure(got == expected, || format!("{dtype}: {got:?}, expected {expected:?}"))?;
    }
    Ok(())
}

pub(super) fn tensors_go_to_the_device_and_back(b: &Bench) -> Outcome {
    let values = numbers(44, 2 * 3 * 4);
    for kind in b.backend.capabilities().memory.into_iter().filter(|kind| kind.is_host()) {
        let host = |shape: &[usize]| allocate_tensor(b.backend.as_ref(), kind, b.dtype, shape);
        let (there, back) = (host(&[2, 3, 4])?, host(&[4, 2, 3])?);
        b.stream.write(&there, &crate::bench::encode(b.dtype, &values))?;
        let device = b.tensor(b.dtype, &[3, 2, 4])?;
        // One stream keeps the two copies in order, without a wait in between.
        there.permute(&[1, 0, 2])?.h2d(&device, b.stream.as_ref())?;
        device.permute(&[2, 1, 0])?.d2h(&back, b.stream.as_ref())?;
        let all = rounded(b.dtype, &values);
        let expected: Vec<f32> =
            oracle::elements(&there.permute(&[2, 0, 1])?).into_iter().map(|i| all[i]).collect();
        equal(&format!("{kind} memory to the device and back"), &b.download(&back)?, &expected)?;
        let wrong = back.d2h(&device, b.stream.as_ref());
        ensure(matches!(wrong, Err(Error::WrongMemory { got, .. }) if got == kind), || {
            format!("host memory as device memory gave {wrong:?}")
        })?;
        let wrong = device.h2d(&back, b.stream.as_ref());
        ensure(matches!(wrong, Err(Error::WrongMemory { got: MemoryKind::Device, .. })), || {
            format!("device memory as host memory gave {wrong:?}")
        })?;
    }
    Ok(())
}

pub(super) fn wrong_tensor_copies_are_refused_and_write_nothing(b: &Bench) -> Outcome {
    let values = numbers(45, 24);
    let base = b.upload(b.dtype, &[4, 6], &values)?;
    let other = b.tensor(b.dtype, &[4, 6])?;
    let packed = b.tensor(DType::I4, &[4, 6])?;
    let fresh = |shape: &[usize]| b.tensor(DType::I4, shape);
    for (what, src, dst) in [
        ("another rank", other.select(0, 0)?, base.clone()),
        ("another extent", other.slice(0, 0, 3)?, base.clone()),
        ("another element type", b.tensor(DType::U8, &[4, 6])?, base.clone()),
        ("a view onto itself", base.clone(), base.clone()),
        ("rows onto rows that they reach into", base.slice(0, 0, 3)?, base.slice(0, 1, 4)?),
        ("columns between columns", base.slice(1, 0, 2)?, base.slice(1, 2, 4)?),
        ("a destination with one address", other.clone(), strided(&base, &[4, 6], &[0, 1], 0)?),
        ("a destination with rows in rows", other.clone(), strided(&base, &[4, 6], &[2, 1], 0)?),
        ("rows of an odd number of 4-bit elements", fresh(&[4, 3])?, packed.slice(1, 0, 3)?),
        ("4-bit elements apart", packed.permute(&[1, 0])?, fresh(&[6, 4])?),
        ("4-bit rows that begin inside a byte", strided(&packed, &[3, 2], &[5, 1], 0)?, fresh(&[3, 2])?),
    ] {
        let got = b.stream.copy_tensor(&CopyTensor { src, dst });
        let typed =
            matches!(got, Err(Error::Mismatch { .. } | Error::Aliased { .. } | Error::InvalidStrides { .. }));
        ensure(typed, || format!("{what} gave {got:?}"))?;
    }
    equal("memory after copies that were refused", &b.download(&base)?, &rounded(b.dtype, &values))
}
