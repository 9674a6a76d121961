//! Tensor views: strides, slices, addresses, and refused arguments.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvcore::{DType, Dims, Error, MemoryKind, Storage, TensorView};

#[derive(Debug)]
struct Plain(usize);

impl Storage for Plain {
    fn len(&self) -> usize {
        self.0
    }
    fn address(&self) -> u64 {
        4096
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::System
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

fn view() -> TensorView {
    TensorView::new(Arc::new(Plain(4 * 24)), DType::F32, &[2, 3, 4]).unwrap()
}

#[test]
fn slices_and_addresses_follow_the_strides() {
    let v = view();
    assert_eq!(v.address(&[1, 2, 3]).unwrap(), 4096 + 4 * 23);
    let s = v.slice(1, 1, 3).unwrap();
    assert_eq!((s.shape(), s.address(&[0, 0, 0]).unwrap()), (&[2, 2, 4][..], 4096 + 4 * 4));
    assert!(!s.is_contiguous() && v.is_contiguous());
    let p = v.permute(&[2, 0, 1]).unwrap();
    assert_eq!(p.address(&[3, 1, 2]).unwrap(), v.address(&[1, 2, 3]).unwrap());
    assert_eq!(v.select(0, 1).unwrap().shape(), &[3, 4]);
}

#[test]
fn an_empty_slice_at_the_end_stays_inside() {
    let v = view().slice(0, 2, 2).unwrap();
    assert!(v.is_empty());
    assert_eq!(v.offset(), 0);
    assert!(v.permute(&[1, 2, 0]).unwrap().is_contiguous() && !v.overlaps(&view()).unwrap());
}

#[test]
fn slices_of_empty_and_of_four_bit_views_know_their_ends() {
    let empty = view().slice(1, 1, 1).unwrap();
    assert!(empty.slice(1, 0, 0).unwrap().is_empty());
    assert!(matches!(empty.slice(1, 0, 1), Err(Error::TooLarge { value: 1, most: 0, .. })));
    assert!(matches!(empty.slice(1, 1, 0), Err(Error::TooLarge { value: 1, most: 0, .. })));
    assert!(matches!(empty.select(1, 0), Err(Error::OutOfRange { .. })));
    let packed = TensorView::new(Arc::new(Plain(12)), DType::I4, &[2, 3, 4]).unwrap();
    assert!(matches!(packed.slice(2, 4, 2), Err(Error::TooLarge { value: 4, most: 2, .. })));
    assert!(matches!(packed.slice(2, 2, 5), Err(Error::TooLarge { value: 5, most: 4, .. })));
    assert!(packed.slice(2, 3, 3).unwrap().is_empty(), "no element, no byte to begin inside");
}

#[test]
fn views_overlap_by_the_bytes_between_their_ends() {
    let v = view();
    let (upper, lower) = (v.select(0, 0).unwrap(), v.select(0, 1).unwrap());
    assert!(!upper.overlaps(&lower).unwrap() && upper.overlaps(&v).unwrap());
    let (left, right) = (v.slice(2, 0, 2).unwrap(), v.slice(2, 2, 4).unwrap());
    assert!(left.overlaps(&right).unwrap(), "interleaved");
    assert!(!left.slice(2, 0, 0).unwrap().overlaps(&v).unwrap(), "an empty view overlaps nothing");
}

#[test]
fn reversed_and_outside_slices_are_errors() {
    let v = view();
    assert!(matches!(v.slice(0, 2, 1), Err(Error::TooLarge { value: 2, most: 1, .. })));
    assert!(matches!(v.slice(0, 0, 3), Err(Error::TooLarge { value: 3, most: 2, .. })));
    assert!(matches!(v.slice(3, 0, 0), Err(Error::OutOfRange { .. })));
    assert!(matches!(v.address(&[0, 3, 0]), Err(Error::OutOfRange { .. })));
    assert!(v.permute(&[0, 0, 1]).is_err());
}

#[test]
fn a_view_larger_than_its_storage_is_an_error() {
    let storage = Arc::new(Plain(95));
    assert!(matches!(
        TensorView::new(storage, DType::F32, &[2, 3, 4]),
        Err(Error::TooLarge { value: 96, most: 95, .. })
    ));
    assert!(TensorView::new(Arc::new(Plain(12)), DType::I4, &[2, 3, 4]).is_ok());
    let short = TensorView::new(Arc::new(Plain(11)), DType::I4, &[2, 3, 4]);
    assert!(matches!(short, Err(Error::TooLarge { value: 12, most: 11, .. })));
}

#[test]
fn four_bit_elements_are_addressed_on_byte_boundaries_only() {
    let v = TensorView::new(Arc::new(Plain(12)), DType::I4, &[2, 3, 4]).unwrap();
    assert_eq!(v.address(&[1, 2, 2]).unwrap(), 4096 + 11);
    assert!(matches!(v.address(&[0, 0, 1]), Err(Error::InsideByte { address: 4096, .. })));
    assert_eq!(v.slice(2, 2, 3).unwrap().address(&[1, 0, 0]).unwrap(), 4096 + 7);
    assert!(matches!(v.slice(2, 1, 4), Err(Error::InsideByte { .. })));
    assert!(matches!(v.select(2, 3), Err(Error::InsideByte { .. })));
    let (shape, strides) = (Dims::new(&[2]).unwrap(), Dims::new(&[1]).unwrap());
    let odd = TensorView::with_strides(Arc::new(Plain(12)), DType::I4, shape, strides, 3);
    assert!(matches!(odd, Err(Error::InsideByte { .. })));
}
