/* Facts about the libraries of CANN: the names, values, layouts and prototypes that the backend uses, as CANN 8.0 and later
 * have them. `cargo xtask bindgen` makes Rust of this page, and compare.rs compares it with headers of CANN.
 *
 * compare.rs reads the page by lines: a value is `NAME = number`, a field or a prototype ends at its semicolon. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus) && !defined(ASCEND_IN_A_NAMESPACE)
extern "C" {
#endif

/* ---- libascendcl: values ------------------------------------------------------------------------------------------ */

typedef int32_t aclError;
typedef void *aclrtStream;
typedef void *aclrtEvent;
typedef void *aclrtContext;
typedef void *aclrtDrvMemHandle;
typedef void *aclmdlRI;

enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_INVALID_PARAM = 100000,
    ACL_ERROR_UNINITIALIZE = 100001,
    ACL_ERROR_REPEAT_INITIALIZE = 100002,
    ACL_ERROR_COMPILING_STUB_MODE = 100039,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_INVALID_DEVICEID = 107001,
    ACL_ERROR_RT_CONTEXT_NULL = 107002,
    ACL_ERROR_RT_STREAM_CONTEXT = 107003,
    ACL_ERROR_BAD_ALLOC = 200000,
    ACL_ERROR_API_NOT_SUPPORT = 200001,
    ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_RESOURCE_ALLOC_FAIL = 207005,
    ACL_ERROR_RT_INTERNAL_ERROR = 507000,
    ACL_ERROR_RT_STREAM_NOT_COMPLETE = 507004,
    ACL_ERROR_RT_AICORE_TIMEOUT = 507014,
    ACL_ERROR_RT_AICORE_EXCEPTION = 507015
};

typedef enum {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_INT64 = 9,
    ACL_BOOL = 12,
    ACL_BF16 = 27
} aclDataType;

typedef enum { ACL_FORMAT_UNDEFINED = -1, ACL_FORMAT_NCHW = 0, ACL_FORMAT_ND = 2 } aclFormat;

typedef enum {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3
} aclrtMemcpyKind;

typedef enum { ACL_MEM_MALLOC_HUGE_FIRST = 0, ACL_MEM_MALLOC_NORMAL_ONLY = 2 } aclrtMemMallocPolicy;

typedef enum { ACL_HBM_MEM = 1, ACL_HBM_MEM_HUGE = 4, ACL_HBM_MEM_NORMAL = 5 } aclrtMemAttr;

typedef enum { ACL_MEM_HANDLE_TYPE_NONE = 0 } aclrtMemHandleType;
typedef enum { ACL_MEM_ALLOCATION_TYPE_PINNED = 0 } aclrtMemAllocationType;
typedef enum { ACL_MEM_LOCATION_TYPE_HOST = 0, ACL_MEM_LOCATION_TYPE_DEVICE = 1 } aclrtMemLocationType;
typedef enum { ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM = 0 } aclrtMemGranularityOptions;

typedef struct aclrtMemLocation {
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

typedef struct aclrtPhysicalMemProp {
    aclrtMemHandleType handleType;
    aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
} aclrtPhysicalMemProp;

/* Events and streams have opposite numbers for the same status. */
typedef enum {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;
typedef enum { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 } aclrtStreamStatus;

enum { ACL_EVENT_SYNC = 0x1, ACL_EVENT_TIME_LINE = 0x8 };
enum { ACL_STREAM_FAST_LAUNCH = 0x1, ACL_STREAM_FAST_SYNC = 0x2 };

typedef enum {
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL = 0,
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1,
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED = 2
} aclmdlRICaptureMode;

/* ---- libascendcl: functions ---------------------------------------------------------------------------------------- */

aclError aclInit(const char *configPath);
const char *aclGetRecentErrMsg(void);
const char *aclrtGetSocName(void);
aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);

aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtResetDevice(int32_t deviceId);
aclError aclrtGetDevice(int32_t *deviceId);
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtSetCurrentContext(aclrtContext context);

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtSynchronizeEvent(aclrtEvent event);

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option, size_t *granularity);
aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags);
aclError aclrtReleaseMemAddress(void *virPtr);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *virPtr);

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode);
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI);
aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream);
aclError aclmdlRIDestroy(aclmdlRI modelRI);

/* ---- libnnopbase: tensors and other arguments of operators --------------------------------------------------------- */

typedef int32_t aclnnStatus;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclOpExecutor aclOpExecutor;

aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride,
                           int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum,
                           void *tensorData);
aclnnStatus aclDestroyTensor(const aclTensor *tensor);
aclScalar *aclCreateScalar(void *value, aclDataType dataType);
aclnnStatus aclDestroyScalar(const aclScalar *scalar);
aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
aclnnStatus aclDestroyIntArray(const aclIntArray *array);
/* A list owns its tensors: they go with it. */
aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size);
aclnnStatus aclDestroyTensorList(const aclTensorList *list);
/* Called right after the first phase: a call of its own then destroys the executor, and not the second phase. */
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);

/* ---- libopapi: operators, in two phases ---------------------------------------------------------------------------- */

/* The second phase of every operator: consumes the executor. */
typedef aclnnStatus (*aclnnRun)(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#define PHASES(name, ...)                                                                                              \
    aclnnStatus name##GetWorkspaceSize(__VA_ARGS__, uint64_t *workspaceSize, aclOpExecutor **executor);                \
    aclnnStatus name(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream)

PHASES(aclnnInplaceIndexCopy, aclTensor *selfRef, int64_t dim, const aclTensor *index, const aclTensor *source);
PHASES(aclnnIndexSelect, const aclTensor *self, int64_t dim, const aclTensor *index, aclTensor *out);
PHASES(aclnnInplaceCopy, aclTensor *selfRef, const aclTensor *src);
PHASES(aclnnCast, const aclTensor *self, const aclDataType dtype, aclTensor *out);
PHASES(aclnnAdd, const aclTensor *self, const aclTensor *other, const aclScalar *alpha, aclTensor *out);
PHASES(aclnnSub, const aclTensor *self, const aclTensor *other, const aclScalar *alpha, aclTensor *out);
PHASES(aclnnMul, const aclTensor *self, const aclTensor *other, aclTensor *out);
PHASES(aclnnDiv, const aclTensor *self, const aclTensor *other, aclTensor *out);
PHASES(aclnnMuls, const aclTensor *self, const aclScalar *other, aclTensor *out);
PHASES(aclnnExp, const aclTensor *self, aclTensor *out);
PHASES(aclnnLog, const aclTensor *self, aclTensor *out);
PHASES(aclnnTanh, const aclTensor *self, aclTensor *out);
PHASES(aclnnRound, const aclTensor *self, aclTensor *out);
PHASES(aclnnClamp, const aclTensor *self, const aclScalar *clipValueMin, const aclScalar *clipValueMax, aclTensor *out);
PHASES(aclnnMaximum, const aclTensor *self, const aclTensor *other, aclTensor *out);
PHASES(aclnnAmax, const aclTensor *self, const aclIntArray *dim, bool keepDim, aclTensor *out);
PHASES(aclnnReduceSum, const aclTensor *self, const aclIntArray *dims, bool keepDims, aclDataType dtype, aclTensor *out);
PHASES(aclnnBatchMatMul, const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t cubeMathType);
PHASES(aclnnMatmul, const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t cubeMathType);
PHASES(aclnnRmsNorm, const aclTensor *x, const aclTensor *gamma, double epsilon, const aclTensor *yOut,
       const aclTensor *rstdOut);
PHASES(aclnnSilu, const aclTensor *self, aclTensor *out);
PHASES(aclnnScatterPaKvCache, const aclTensor *key, aclTensor *keyCacheRef, const aclTensor *slotMapping,
       const aclTensor *value, aclTensor *valueCacheRef, const aclTensor *compressLensOptional,
       const aclTensor *compressSeqOffsetOptional, const aclTensor *seqLensOptional, char *cacheModeOptional,
       char *scatterModeOptional, const aclIntArray *stridesOptional, const aclIntArray *offsetsOptional);
PHASES(aclnnFusedInferAttentionScoreV2, const aclTensor *query, const aclTensorList *key, const aclTensorList *value,
       const aclTensor *pseShiftOptional, const aclTensor *attenMaskOptional, const aclIntArray *actualSeqLengthsOptional,
       const aclIntArray *actualSeqLengthsKvOptional, const aclTensor *deqScale1Optional,
       const aclTensor *quantScale1Optional, const aclTensor *deqScale2Optional, const aclTensor *quantScale2Optional,
       const aclTensor *quantOffset2Optional, const aclTensor *antiquantScaleOptional,
       const aclTensor *antiquantOffsetOptional, const aclTensor *blockTableOptional,
       const aclTensor *queryPaddingSizeOptional, const aclTensor *kvPaddingSizeOptional,
       const aclTensor *keyAntiquantScaleOptional, const aclTensor *keyAntiquantOffsetOptional,
       const aclTensor *valueAntiquantScaleOptional, const aclTensor *valueAntiquantOffsetOptional,
       const aclTensor *keySharedPrefixOptional, const aclTensor *valueSharedPrefixOptional,
       const aclIntArray *actualSharedPrefixLenOptional, int64_t numHeads, double scaleValue, int64_t preTokens,
       int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise,
       int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag, int64_t keyAntiquantMode,
       int64_t valueAntiquantMode, const aclTensor *attentionOut, const aclTensor *softmaxLse);

#undef PHASES

/* ---- libhccl ------------------------------------------------------------------------------------------------------- */

typedef void *HcclComm;

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_RUNTIME = 15,
    HCCL_E_AGAIN = 20,
    HCCL_E_REMOTE = 21
} HcclResult;

/* Not the numbers of aclDataType. */
typedef enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_BFP16 = 11
} HcclDataType;

typedef enum { HCCL_REDUCE_SUM = 0, HCCL_REDUCE_MAX = 2, HCCL_REDUCE_MIN = 3 } HcclReduceOp;
typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;

enum { HCCL_ROOT_INFO_BYTES = 4108 };

typedef struct HcclRootInfoDef {
    char internal[HCCL_ROOT_INFO_BYTES];
} HcclRootInfo;

typedef struct HcclSendRecvItemDef {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;

HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo);
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, HcclComm *comm);
HcclResult HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms);
HcclResult HcclCommDestroy(HcclComm comm);
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
const char *HcclGetErrorString(HcclResult code);
HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm, aclrtStream stream);
HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm,
                         aclrtStream stream);
HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream);
HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream);

#if defined(__cplusplus) && !defined(ASCEND_IN_A_NAMESPACE)
}
#endif
