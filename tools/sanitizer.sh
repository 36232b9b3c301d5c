# The CUDA tests that are short enough for compute-sanitizer, and how they run under it. Sourced by check and gpu_check.sh.

sanitized_tests=(
  'Cuda*/RecurrenceLaws/*.VarlenPrefillFoldsRings' 'Cuda*/RecurrenceLaws/*.RollbackMovesNoStateBytes'
  'Cuda*/RecurrenceLaws/*.MaterialiseAtEveryPositionLeavesTheSource' 'Cuda*/RecurrenceLaws/*.ABadNumberStaysHome'
  'Cuda*/CudaRecurrence/*.ShortOutputsAreLongOnesRounded' 'Cuda*/CudaRecurrence/*.PlanesAreWords'
  'Cuda*/CudaRecurrence/*.ARowOutsideThePoolIsNamed' 'Cuda*/CudaRecurrence/*.PrefillInChunksHasTheBitsOfSteps'
  'CudaMoves.LargePieces' 'CudaPool.*' CudaDelta.{StridesAndSeparateCheckpoints,LargeTokensStayFinite}
  'CudaMamba2.StridesAndSeparateCheckpoints' 'CudaDeviceTest.CommitRowsMovesCursors'
  CudaLayer.{GatedDeltaNet,KimiDeltaAttention,Mamba2} CudaConv1d.{RollsBack,BatchAndPaddingAreNothing}
  CudaAttention.{AnyAlignmentIsRight,LargeScoresStayFinite,NamesARowOfTooManyTokens} 'CudaGates.*MatchTheFormula' CudaNorm.{InPlaceHasTheSameBits,GateFirstRmsNormMatchesTheOracle})

# Not for racecheck: of kernels whose warps hand over at barriers where one lane arrives for all of its warp, racecheck sees
# that lane's accesses in order and takes the other lanes' for races.
handing_over_tests=('Cuda*/RecurrenceLaws/*' 'Cuda*/CudaRecurrence/*' 'CudaDelta.*' 'CudaMamba2.*' 'CudaLayer.*' 'CudaPool.*'
  'CudaAttention.*')

# The path of compute-sanitizer, or nothing.
find_sanitizer() {
  PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer command -v compute-sanitizer
}

# run_sanitizer TOOL TESTS: runs those tests of the binary TESTS under memcheck or racecheck; any finding is a failure, and so
# are five minutes.
run_sanitizer() {
  local filter
  filter=$(IFS=:; echo "${sanitized_tests[*]}")
  [ "$1" != racecheck ] || filter+=-$(IFS=:; echo "${handing_over_tests[*]}")
  timeout 300 "$(find_sanitizer)" --tool "$1" --error-exitcode 9 "$2" --gtest_filter="$filter"
}
